"""Variants of DeepSeek-V3's attention: they differ in what they cache and in how they compute."""

from __future__ import annotations

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek


class _Rotated(deepseek.DeepseekV3Attention):
    def _project(self, hidden, position_embeddings):
        batch, count = hidden.shape[:2]
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.view(batch, count, -1, self.qk_head_dim).transpose(1, 2)
        plain, turned = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, key = self.kv_a_proj_with_mqa(hidden).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)[:, None]
        turned, key = deepseek.apply_rotary_pos_emb_interleave(
            turned, key[:, None], *position_embeddings)
        return torch.cat([plain, turned], -1), latent, key


class ExpandedAttention(_Rotated):
    """Caches keys and values of each head, like transformers 5.2."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None,
                past_key_values=None, **kwargs):
        query, latent, key = self._project(hidden_states, position_embeddings)
        keys, values = self.expand_kv(latent, key)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, deepseek.eager_attention_forward)
        out, weights = attend(self, query, keys, values, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), weights


class LatentAttention(_Rotated):
    """Caches the latent and computes attention itself with absorbed queries, like remote code.

    Returns probabilities on request."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None,
                past_key_values=None, output_attentions=False, **kwargs):
        query, latent, key = self._project(hidden_states, position_embeddings)
        if past_key_values is not None:
            latent, key = past_key_values.update(latent, key, self.layer_idx)
        plain, turned = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        up = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        to_key, to_value = up.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        absorbed = torch.einsum("bhqd,hdc->bhqc", plain, to_key)
        logits = (absorbed @ latent.transpose(2, 3) + turned @ key.transpose(2, 3)) * self.scaling
        weights = torch.softmax(logits + attention_mask, -1)
        out = torch.einsum("bhqc,hdc->bqhd", weights @ latent, to_value)
        out = self.o_proj(out.reshape(*hidden_states.shape[:2], -1))
        return out, (weights if output_attentions else None)


def replace_attention(model, cls):
    """Replaces the model's attention class."""
    for layer in model.model.layers:
        layer.self_attn.__class__ = cls
    return model
