"""A model and a store: what is made once, for any number of caches."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Dict, List, Optional, Tuple, Union

import kvtier

from ._errors import invalid, unsupported, with_advice
from ._planes import Gpu
from ._shapes import LayerShape, groups_of, shapes_of
from .cache import TieredCache
from .fingerprint import adapters_of, config_digest, fingerprint, versions_of
from .sessions import as_rows

#: Of `Identity.extra`: how this package lays KV out, and which attention computed it.
_FORMAT, _ATTENTION = 0x80000054, 0x80000055


def refuse_moving_positions(model: Any) -> None:
    """An error where a token's K depends on how long its sequence became later."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise unsupported(f"rope_type {kind!r}: keys depend on the length of the whole "
                                  "sequence, so that tokens do not say whose they are; use the "
                                  "stock cache for this model")


def _device_of(store: kvtier.Store) -> kvtier.Device:
    """The CUDA device that a store was opened with."""
    device = store._device
    if device is None or device.info.kind != "cuda":
        raise invalid("gpu= needs a store that was opened with a CUDA device: kvtier.Store(..., "
                      "device=kvtier.Device(runtime, 'cuda', ordinal=...)); without gpu= torch "
                      "copies KV to host memory first")
    return device


class Tiers:
    """Binds a model to a store: `Tiers(model, 'store(host=2GiB)')`, or a `kvtier.Store` of yours.

    KV is shared by whoever has the same model: its class, configuration, weights (`weights=`, or
    `fingerprint(model)`), adapters, dtype and attention implementation, and the same `salt`.
    A hook on the model notes the tokens of each forward pass, so that caches can store what is
    full while they generate. `close` takes it away. Make a new one after the weights or the
    adapters have changed, and after eviction was removed from the model."""

    def __init__(self, model: Any, store: "Union[str, kvtier.Store]" = "store(host=1GiB)", *,
                 chunk_tokens: int = 16, weights: Optional[bytes] = None,
                 salt: Optional[bytes] = None, policy: str = "", tenant: int = 0,
                 gpu: Optional[int] = None) -> None:
        if not 1 <= chunk_tokens <= 32768:
            raise invalid(f"chunks of {chunk_tokens} tokens: 1 to 32768")
        if getattr(model.config, "is_encoder_decoder", False):
            raise invalid("a model with encoder and decoder: TieredCache has decoder-only models")
        refuse_moving_positions(model)
        #: The layers that keep something.
        self.shapes: List[LayerShape] = shapes_of(model)
        # All that may fail for the model's sake, before a store is opened.
        who = kvtier.Identity(
            model=config_digest(model), weights=weights or fingerprint(model),
            lora=adapters_of(model), salt=salt,
            extra={_FORMAT: b"[chunk][K, V][token][head][dim] 1",
                   _ATTENTION: str(getattr(model.config, "_attn_implementation", "")).encode()})
        #: Tokens of a chunk, the unit that is stored and shared.
        self.chunk_tokens = chunk_tokens
        self.tenant = tenant
        self._runtime: Optional[kvtier.Runtime] = None
        #: What moves KV of one GPU without a copy of torch's.
        self.gpu: Optional[Gpu] = None
        self._device: Optional[kvtier.Device] = None
        if isinstance(store, str):
            self._runtime = kvtier.Runtime(name="tiers")
            try:
                if gpu is not None:
                    self._device = kvtier.Device(self._runtime, "cuda", ordinal=gpu)
                    self.gpu = Gpu(self._device, gpu)
                self.store = kvtier.Store(self._runtime, store, policy=policy,
                                          device=self._device)
            except kvtier.Error:
                self._close_own(None)
                raise
        else:
            self.store = store
            if gpu is not None:
                self.gpu = Gpu(_device_of(store), gpu)
        try:
            self.namespace = self.store.namespace(who, chunk_tokens=chunk_tokens,
                                                  groups=groups_of(self.shapes))
        except kvtier.Error:
            if self._runtime is not None:
                self.store.close()
                self._close_own(None)
            raise
        self._names = list(inspect.signature(model.forward).parameters)
        self._model = weakref.ref(model)
        self._made = self._what(model)
        self._hook = model.register_forward_pre_hook(self._before, with_kwargs=True)

    @staticmethod
    def _what(model: Any) -> Tuple[Any, ...]:
        """What of the identity can be seen without reading weights."""
        return (getattr(model.config, "_attn_implementation", ""), adapters_of(model),
                versions_of(model))

    @property
    def changed(self) -> str:
        """What of the model is not as it was when this was made; "" where nothing is seen."""
        model = self._model()
        if model is None:
            return "the model is gone"
        names = ("attention implementation", "adapters", "weights")
        return ", ".join(f"the model has other {name} than when Tiers was made" for name, now, then
                         in zip(names, self._what(model), self._made) if now != then)

    def __deepcopy__(self, _memo: Any) -> "Tiers":
        # The hook in a copy of the model comes here: that is another model, which is not watched.
        return self

    def cache(self, *, resident_layers: Optional[int] = None) -> TieredCache:
        """A cache without tokens, for one batch. With `resident_layers` only so many layers'
        KV is in torch memory at a time (2 or more: one in use, the next under way)."""
        return TieredCache(self, resident_layers=resident_layers)

    def lookup(self, tokens: Any) -> int:
        """How many tokens of a sequence a cache could resume with now."""
        return self.namespace.lookup(as_rows(tokens)[0]).reusable_tokens

    def observe_prefill(self, context_tokens: int, tokens: int, seconds: float) -> None:
        """The model took so long to compute tokens behind others: `resume(plan=True)` goes by
        what it is told here, and until then by a guess of 10,000 tokens a second."""
        self.namespace.observe_prefill(context_tokens, tokens, max(1, round(seconds * 1e9)))

    def _before(self, model: Any, args: Any, kwargs: Dict[str, Any]) -> None:
        if args:
            kwargs = {**dict(zip(self._names, args)), **kwargs}
        cache = kwargs.get("past_key_values")
        watched: Any = self._model()
        if isinstance(cache, TieredCache) and cache.tiers is self and watched is model:
            cache.before(kwargs.get("input_ids"), kwargs, model.training)

    def stats(self) -> Dict[str, int]:
        """What the store counts."""
        return self.store.stats()

    @property
    def level(self) -> int:
        """The best that the store can promise."""
        has_disk = self.store.stats()["disk_engine"] != kvtier.IO_NONE
        return kvtier.LEVEL_DURABLE if has_disk else kvtier.LEVEL_RAM

    def close(self, timeout: Optional[float] = None) -> None:
        """Takes the hook away and, where the store was made from a spec, closes it; moves under
        way end. `BusyError` when time runs out, and then it can be tried again."""
        self._hook.remove()
        try:
            self.namespace.close()
            if self._runtime is not None:
                self.store.close(timeout)
                self._close_own(timeout)
        except kvtier.ForkedError as error:
            raise with_advice(error) from None

    def _close_own(self, timeout: Optional[float]) -> None:
        if self._device is not None:
            self._device.close(timeout)
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
