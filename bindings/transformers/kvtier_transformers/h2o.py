"""Token eviction for transformers models: `install_kv_eviction`."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any

import kvtier
import torch
import transformers
from kvtier import _abi
from kvtier._errors import make
from kvtier.h2o import MAX_TOKENS, Policy, check_traits, spec
from transformers.cache_utils import DynamicCache, DynamicLayer, get_layer_types_and_kwargs

from . import attention, attention_sums
from .attention import (
    SDPA,
    AttentionAdapter,
    adapter_of,
    narrow,
    real_columns,
    register_attention,
)
from .h2o_layer import EvictingLayer

__all__ = ["AttentionAdapter", "Eviction", "eviction_of", "install_kv_eviction",
           "register_attention", "remove_kv_eviction", "reset_eviction_scores"]

#: Supported releases of transformers.
VERSIONS = ("5.23.",)
_ATTRIBUTE = "_kvtier_eviction"
#: Types of layers whose caches are bounded already.
_SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding",
            "reference_sliding_attention")


def _state(text: str) -> Exception:
    return make(_abi.KVT_E_STATE, text)


def _unsupported(text: str) -> Exception:
    return make(_abi.KVT_E_UNSUPPORTED, text)


class _Frame:
    """One forward pass of an attention module."""

    def __init__(self, eviction: Eviction, adapter: AttentionAdapter, layer: EvictingLayer,
                 positions: torch.Tensor | None) -> None:
        self.eviction, self.adapter, self.layer = eviction, adapter, layer
        #: The model's mask, narrowed to resident rows.
        self.mask: torch.Tensor | None = None
        #: Number of new columns, and which of them are not padding (None: all).
        self.count = 0
        self.real: torch.Tensor | None = None
        self.positions = positions
        #: Rows with which attention was computed.
        self.rows = 0
        #: Whether the caller requested probabilities.
        self.weights_requested = False
        self._recorded: tuple[torch.Tensor, torch.Tensor, float | None] | None = None

    def record(self, query: torch.Tensor, key: torch.Tensor, scaling: float | None) -> None:
        """Records the inputs of sdpa."""
        self._recorded = query, key, scaling

    def finish(self, module: torch.nn.Module, output: Any) -> None:
        """Counts the computed attention, then evicts tokens."""
        layer, count = self.layer, self.count
        is_prefill = count > 1 or layer.seen == 0
        heads = self.adapter.query_heads(module)
        evictor = layer.open(heads, self.adapter.latent, self.eviction.layer_count)
        evictor.extend(count, None if self.real is None else self.real.numpy())
        self.rows = int(layer.keys.shape[2])
        if evictor.wants_keys:
            for sequence in range(evictor.batch):
                layer.append_keys(evictor, sequence, count)
        wanted = evictor.wants_sums(is_prefill)
        if wanted:
            self._observe(evictor, count, wanted, output)
        kept = evictor.evict(is_prefill)
        if kept is not None:
            layer.keep(kept)
        layer.busy = False

    def _observe(self, evictor: Any, count: int, wanted: int, output: Any) -> None:
        weights = None
        if self.eviction.implementation == "eager":
            weights = output[self.adapter.weights] if isinstance(output, tuple) else None
            if weights is None or weights.shape[-1] != evictor.rows:
                raise _state("forward returned no probabilities for the resident keys: set weights "
                             "and weights_keyword of the class's AttentionAdapter, see porting.md")
        elif self._recorded is None:
            raise _state("attention was computed by another function than sdpa, probably after "
                         "set_attn_implementation: call remove_kv_eviction and "
                         "install_kv_eviction again")
        else:
            attention_sums.check_causal(self.mask, evictor, count)
        for sequence in range(evictor.batch):
            if not evictor.new_tokens(sequence):
                continue  # padding only, as in a part of a chunked prompt
            new, resident = evictor.new_rows(sequence, count), evictor.real_rows(sequence)
            if weights is not None:
                sums, queries = attention_sums.from_weights(
                    weights[sequence], new, resident, wanted, evictor.by_head)
            elif self._recorded is not None:
                query, key, scaling = self._recorded
                sums, queries = attention_sums.from_keys(
                    query[sequence][:, new], key[sequence][:, resident], scaling, wanted,
                    evictor.by_head, self.eviction.threads)
            evictor.observe(sequence, sums, queries)


class Eviction:
    """Eviction that is installed in a model. Scores belong to caches, not to the model."""

    def __init__(self, policy: Policy, implementation: str, layer_count: int,
                 threads: int) -> None:
        #: The policy's spec, or a function that creates policies.
        self.policy = policy
        self.implementation, self.layer_count, self.threads = implementation, layer_count, threads
        #: The hooked attention modules by layer.
        self.modules: dict[int, Any] = {}
        #: Arguments of `install_kv_eviction`, for `check`.
        self.numbers: dict[str, Any] = {}
        #: For `check`: a callback for each pass of a module, and the pass that started last.
        self.watch: Any = None
        self.last: _Frame | None = None
        self._handles: list[Any] = []
        self._configs: list[tuple[Any, str]] = []
        self._layers: weakref.WeakSet[EvictingLayer] = weakref.WeakSet()

    @property
    def layers(self) -> list[EvictingLayer]:
        """The layers of all live caches."""
        return sorted(self._layers, key=lambda layer: layer.index)

    def attach(self, module: Any, adapter: AttentionAdapter) -> None:
        """Installs hooks in a module."""
        # Partials, not closures: deepcopy of the model then copies this eviction with its hooks.
        before, after = partial(self._before, adapter), partial(self._after, adapter)
        self.modules[module.layer_idx] = module
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        config = module.config
        if self.implementation == "sdpa" and not any(config is one for one, _ in self._configs):
            self._configs.append((config, config._attn_implementation_internal))
            config._attn_implementation_internal = SDPA

    def detach(self) -> None:
        """Removes the hooks, and restores the attention implementation."""
        for handle in self._handles:
            handle.remove()
        for config, name in self._configs:
            if config._attn_implementation_internal == SDPA:
                config._attn_implementation_internal = name
        self._handles, self._configs = [], []

    def __getstate__(self) -> dict[str, Any]:
        """State for a copied or pickled model, which has no caches yet."""
        return {**self.__dict__, "_layers": None, "watch": None, "last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layers = weakref.WeakSet()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, adapter: AttentionAdapter, module: Any, args: Any,
                kwargs: dict[str, Any]) -> Any:
        cache = next((kwargs[name] for name in adapter.caches if kwargs.get(name) is not None),
                     None)
        if cache is None:
            attention.enter(module, None)
            return None
        if module.training:
            raise _state("eviction does not support training: call model.eval()")
        hidden: Any = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer = self._layer_of(cache, module.layer_idx)
        frame = _Frame(self, adapter, layer, kwargs.get("position_ids"))
        batch, count = int(hidden.shape[0]), int(hidden.shape[1])
        mask = kwargs.get(adapter.mask)
        frame.count, frame.real = count, real_columns(mask, batch, count, layer.seen)
        if layer.busy or self._layers_differ(cache, layer):
            raise _state("a forward pass failed, so this cache has tokens without scores: begin a "
                         "new cache")
        if layer.evictor is not None:
            device = layer.keys.device
            mask = narrow(mask, layer.evictor, count, adapter.query_heads(module), device)
        frame.mask = mask
        self.last = frame if self.watch is not None else None
        kwargs = {**kwargs, adapter.mask: mask}
        if adapter.weights_keyword is not None:
            frame.weights_requested = bool(kwargs.get(adapter.weights_keyword))
            kwargs[adapter.weights_keyword] = True
        layer.armed = layer.busy = True
        attention.enter(module, frame)
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, adapter: AttentionAdapter, module: Any, _args: Any, _kwargs: Any,
               output: Any) -> Any:
        frame = attention.leave(module)
        if frame is None:
            return output
        with torch.no_grad():
            frame.finish(module, output)
        if self.watch is not None:
            self.watch(module, frame)
        if adapter.weights_keyword is not None and not frame.weights_requested:
            at = adapter.weights
            output = (*output[:at], None, *output[at + 1:])
        return output

    def _layers_differ(self, cache: Any, layer: EvictingLayer) -> bool:
        """Whether layers differ in length when a pass begins: an earlier pass failed midway."""
        return layer.index == min(self.modules) and any(
            isinstance(one, EvictingLayer) and one.seen != layer.seen for one in cache.layers)

    def _layer_of(self, cache: Any, index: int) -> EvictingLayer:
        if type(cache) is not DynamicCache or cache.offloading:
            offloading = " with offloading" if getattr(cache, "offloading", 0) else ""
            raise _unsupported(f"the cache is a {type(cache).__name__}{offloading}: eviction needs "
                               "a DynamicCache without offloading, the default of generate")
        while len(cache.layers) <= index:
            replicate: Any = cache.layer_class_to_replicate
            cache.layers.append(replicate())
        layer = cache.layers[index]
        if isinstance(layer, EvictingLayer) and layer.eviction is self:
            return layer
        if type(layer) is not DynamicLayer:
            raise _unsupported(f"layer {index} of the cache is a {type(layer).__name__}: eviction "
                               "needs a DynamicLayer. Begin a new cache")
        if layer.get_seq_length():
            raise _state(f"the cache has {layer.get_seq_length()} tokens from before eviction was "
                         "installed, which have no scores: begin a new cache")
        evicting = cache.layers[index] = EvictingLayer(self, index)
        self.add_layer(evicting)
        return evicting

    def add_layer(self, layer: EvictingLayer) -> None:
        """Registers a layer of a cache."""
        self._layers.add(layer)


def _check_version() -> None:
    if not transformers.__version__.startswith(VERSIONS):
        raise _unsupported(f"transformers {transformers.__version__} is installed; eviction "
                           f"supports {' and '.join(one + 'x' for one in VERSIONS)}. Install a "
                           "supported version")


def _layer_types(config: Any) -> list[str]:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(text, "kv_sharing_modes", None) is not None:
        raise _unsupported("layers of this model share their caches (kv_sharing_modes), so "
                           "eviction in one layer would affect others: use the model without "
                           "eviction")
    found, _ = get_layer_types_and_kwargs(text)
    return list(found)


def _find(model: Any) -> tuple[list[tuple[Any, AttentionAdapter]], Any]:
    """Returns the attention modules with full attention and their adapters, and the model's
    configuration."""
    known = [(module, adapter) for module in model.modules()
             if (adapter := adapter_of(module)) is not None]
    if not known:
        names = sorted({type(one).__name__ for one in model.modules()
                        if type(one).__name__.endswith("Attention")})
        raise _unsupported("the model has no supported attention class, only "
                           f"{', '.join(names) or 'none'}: add one with register_attention, see "
                           "porting.md")
    config = known[0][0].config
    types = _layer_types(config)
    found = [(module, adapter) for module, adapter in known
             if types[module.layer_idx] == "full_attention"]
    odd = {types[module.layer_idx] for module, _ in known} - {"full_attention", *_SLIDING}
    if odd:
        raise _unsupported(f"the model has layers of type {', '.join(sorted(odd))}: eviction "
                           "supports full attention, beside layers with sliding windows")
    if not found:
        raise _unsupported("all layers of this model have a sliding window, so their caches are "
                           "bounded without eviction")
    if len({module.layer_idx for module, _ in found}) != len(found):
        raise _unsupported("several attention modules have the same layer_idx, so they share a "
                           "layer of the cache: use the model without eviction")
    return found, config


def _implementation(found: list[tuple[Any, AttentionAdapter]]) -> str:
    for module, adapter in found:
        name = module.config._attn_implementation or "eager"
        if name not in ("sdpa", "eager"):
            raise _unsupported(
                f"the attention implementation is {name}, which exposes no probabilities and "
                'accepts no narrowed masks: load the model with attn_implementation="sdpa" or '
                '"eager", or call model.set_attn_implementation("sdpa")')
        if name == "sdpa" and not adapter.interface:
            raise _unsupported(f"{type(module).__name__} does not look up its attention function "
                               "in transformers' table, so sdpa cannot be observed: load the "
                               'model with attn_implementation="eager"')
    return str(found[0][0].config._attn_implementation or "eager")


def _try_policy(policy: Policy, found: list[tuple[Any, AttentionAdapter]], layers: int) -> None:
    module, adapter = found[0]
    heads = adapter.query_heads(module)
    shape = kvtier.Attention(layers, heads, 1 if adapter.latent else adapter.key_heads(module),
                             64, 32, 16, MAX_TOKENS, adapter.latent)
    with kvtier.Sparse(shape, policy if isinstance(policy, str) else policy()) as tried:
        check_traits(tried.traits, shape)


def install_kv_eviction(model: torch.nn.Module, budget: int | None = None, n_sink: int = 4,
                        n_recent: int | None = None, evict_every: int = 1,
                        policy: Policy = "h2o", per_head: bool = False, *,
                        threads: int = 1) -> Eviction:
    """Evicts tokens from the caches that a model fills from now on.

    `policy` is one of the following:

    - a name: "h2o", "tova", "streaming", "keydiff", "knorm", "snapkv", "pyramidkv", "adakv". The
      arguments before it apply.
    - a full spec, such as "snapkv(budget=512,window=32)";
    - a function that creates a custom policy for each layer and sequence.

    With h2o a layer keeps the first `n_sink` tokens, the last `n_recent` (default 256), and the
    `budget` tokens between that received most attention; with `per_head` each key head keeps its
    own set. `threads` is the number of threads that sum attention under sdpa on the CPU.
    """
    _check_version()
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise _state("eviction is already installed in this model: call remove_kv_eviction first")
    found, config = _find(model)
    implementation = _implementation(found)
    numbers: dict[str, Any] = {}
    if isinstance(policy, str):
        numbers = {"budget": budget, "n_sink": n_sink, "n_recent": n_recent,
                   "evict_every": evict_every, "name": policy}
        # The default of n_sink applies only to policies with sinks.
        sinks = None if n_sink == 4 and ("(" in policy or policy in _SINKLESS) else n_sink
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = spec(policy, budget, sinks, n_recent, evict_every, per_head)
        for one in caught:  # again, with the caller's line
            warnings.warn(str(one.message), one.category, stacklevel=2)
    layers = len(_layer_types(config))
    _try_policy(policy, found, layers)
    eviction = Eviction(policy, implementation, layers, threads)
    eviction.numbers = numbers
    for module, adapter in found:
        eviction.attach(module, adapter)
    setattr(model, _ATTRIBUTE, eviction)
    return eviction


_SINKLESS = ("tova", "snapkv", "pyramidkv", "adakv")


def eviction_of(model: torch.nn.Module) -> Eviction:
    """Returns the eviction that is installed in a model."""
    eviction = getattr(model, _ATTRIBUTE, None)
    if not isinstance(eviction, Eviction):
        raise _state("no eviction is installed in this model: call install_kv_eviction")
    return eviction


def remove_kv_eviction(model: torch.nn.Module) -> None:
    """Removes eviction from a model. Caches that were filled with eviction become unusable."""
    eviction_of(model).detach()
    delattr(model, _ATTRIBUTE)


def reset_eviction_scores(model: torch.nn.Module) -> None:
    """Resets the scores of all live caches of the model, and keeps their tokens.

    A new cache starts without scores, so it does not need this call."""
    for layer in eviction_of(model).layers:
        if layer.evictor is not None:
            layer.evictor.forget()
