"""Tokens that the lightning indexer of transformers chooses: the family of tests/data/sparse/dsa.json.

Runs `DeepseekV32Indexer` in a tiny configuration. Its projections are set so that queries, keys and
weights are those of the case: the hidden state of a token holds its key and weights, the residual its
queries. The norm of keys is removed, and rotary positions do not rotate. Products, ReLU, weights,
causal mask and choice are those of transformers.
"""

import torch

from portable import Missing, packed, table


def versions():
    try:
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer  # noqa: F401
    except ImportError as error:
        raise Missing(f"transformers with deepseek_v32: {error}") from error
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}


def cases():
    for n, (heads, dim, tokens, topk) in enumerate(
        [(4, 16, 96, 16), (8, 32, 130, 24), (4, 16, 64, 60), (16, 16, 77, 40), (64, 128, 48, 12)]
    ):
        spec = f"dsa(topk={topk},heads={heads},dim={dim},state=f32)"
        yield {"name": f"dsa {n}", "ask": "queries", "spec": spec, "heads": heads, "key_heads": 1, "dim": dim,
               "tokens": tokens, "gains": [1.0], "period": 0, "layers": 1, "layer": 0, "topk": topk}  # fmt: skip


def run(case, watch):
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    heads, dim, tokens = case["heads"], case["dim"], case["tokens"]
    q = torch.from_numpy(table(case, 1, heads, [1.0])).reshape(1, tokens, heads * dim)
    k = torch.from_numpy(table(case, 3, 1, [1.0])).reshape(1, tokens, dim)
    # Some weights are negative.
    w = torch.from_numpy(table(case, 5, heads, [1.0], dim=1)).reshape(1, tokens, heads)
    config = DeepseekV32Config(
        hidden_size=dim + heads, q_lora_rank=heads * dim, index_n_heads=heads, index_head_dim=dim,
        qk_rope_head_dim=8, index_topk=case["topk"], num_hidden_layers=1,
    )  # fmt: skip
    indexer = DeepseekV32Indexer(config, 0).float()
    indexer.k_norm = torch.nn.Identity()
    with torch.no_grad():
        indexer.wq_b.weight.copy_(torch.eye(heads * dim))
        indexer.wk.weight.copy_(torch.eye(dim, dim + heads))
        indexer.weights_proj.weight.copy_(torch.eye(dim + heads)[dim:])
    hidden = torch.cat([k, w], -1)
    cos, sin = torch.ones(1, tokens, 8), torch.zeros(1, tokens, 8)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None]
    with watch:
        found = indexer(hidden, q, (cos, sin), seen, torch.arange(tokens)[None])
    return {"queries": [packed(i for i in row if i <= at) for at, row in enumerate(found[0].tolist())]}
