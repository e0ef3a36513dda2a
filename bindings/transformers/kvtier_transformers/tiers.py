"""`Tiers`: binds a model to a store, for any number of caches."""

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

#: Keys of `Identity.extra`: this package's KV layout, and the attention implementation.
_FORMAT, _ATTENTION = 0x80000054, 0x80000055


def check_rope_type(model: Any) -> None:
    """Raises if a token's K depends on the later length of its sequence."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise unsupported(f"rope_type {kind!r} is not supported: keys depend on the length "
                                  "of the whole sequence, so tokens do not identify them. Use the "
                                  "stock cache for this model")


def _device_of(store: kvtier.Store) -> kvtier.Device:
    """Returns the CUDA device that a store was opened with."""
    device = store._device
    if device is None or device.info.kind != "cuda":
        raise invalid("gpu= needs a store with a CUDA device: open it with kvtier.Store(..., "
                      "device=kvtier.Device(runtime, 'cuda', ordinal=...)), or omit gpu= and let "
                      "torch copy KV to host memory")
    return device


class Tiers:
    """Binds a model to a store: `Tiers(model, 'store(host=2GiB)')`, or your own `kvtier.Store`.

    KV is shared between equal models: class, configuration, weights (`weights=`, by default
    `fingerprint(model)`), adapters, dtype, attention implementation, and `salt`. A hook on the
    model records the tokens of each forward pass, so that caches can store full chunks during
    generation; `close` removes it. Create a new `Tiers` after weights or adapters change, and
    after eviction is removed from the model."""

    def __init__(self, model: Any, store: "Union[str, kvtier.Store]" = "store(host=1GiB)", *,
                 chunk_tokens: int = 16, weights: Optional[bytes] = None,
                 salt: Optional[bytes] = None, policy: str = "", tenant: int = 0,
                 gpu: Optional[int] = None) -> None:
        if not 1 <= chunk_tokens <= 32768:
            raise invalid(f"chunk_tokens is {chunk_tokens}: chunks have 1 to 32768 tokens")
        if getattr(model.config, "is_encoder_decoder", False):
            raise invalid(f"{type(model).__name__} has an encoder and a decoder: TieredCache "
                          "supports decoder-only models. Use the stock cache for this model")
        check_rope_type(model)
        #: The layers that cache KV.
        self.shapes: List[LayerShape] = shapes_of(model)
        # Everything that depends on the model may fail: do it before opening a store.
        identity = kvtier.Identity(
            model=config_digest(model), weights=weights or fingerprint(model),
            lora=adapters_of(model), salt=salt,
            extra={_FORMAT: b"[chunk][K, V][token][head][dim] 1",
                   _ATTENTION: str(getattr(model.config, "_attn_implementation", "")).encode()})
        #: Tokens of a chunk, the unit of storage and sharing.
        self.chunk_tokens = chunk_tokens
        self.tenant = tenant
        self._runtime: Optional[kvtier.Runtime] = None
        #: Transfers KV of one GPU without staging copies by torch; None: torch copies.
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
                self._close_runtime(None)
                raise
        else:
            self.store = store
            if gpu is not None:
                self.gpu = Gpu(_device_of(store), gpu)
        try:
            self.namespace = self.store.namespace(identity, chunk_tokens=chunk_tokens,
                                                  groups=groups_of(self.shapes))
        except kvtier.Error:
            if self._runtime is not None:
                self.store.close()
                self._close_runtime(None)
            raise
        self._names = list(inspect.signature(model.forward).parameters)
        self._model = weakref.ref(model)
        self._initial_state = self._model_state(model)
        self._hook = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @staticmethod
    def _model_state(model: Any) -> Tuple[Any, ...]:
        """Returns the parts of the identity that can be checked without reading weights."""
        return (getattr(model.config, "_attn_implementation", ""), adapters_of(model),
                versions_of(model))

    @property
    def changed(self) -> str:
        """Describes detected changes of the model since this `Tiers` was created; "" if none."""
        model = self._model()
        if model is None:
            return "the model was deleted"
        names = ("attention implementation", "adapters", "weights")
        states = zip(names, self._model_state(model), self._initial_state)
        return ", ".join(f"the model has other {name} than when Tiers was created"
                         for name, now, then in states if now != then)

    def __deepcopy__(self, _memo: Any) -> "Tiers":
        # A copied model copies this hook. The copy is another model, and the hook ignores it.
        return self

    def cache(self, *, resident_layers: Optional[int] = None) -> TieredCache:
        """Creates an empty cache for one batch.

        `resident_layers` is the number of layers with KV in torch memory at a time; None: all. Use
        2 or more: while one layer is in use, the next ones are loaded."""
        return TieredCache(self, resident_layers=resident_layers)

    def lookup(self, tokens: Any) -> int:
        """Returns how many tokens of a sequence a cache could resume now."""
        return self.namespace.lookup(as_rows(tokens)[0]).reusable_tokens

    def observe_prefill(self, context_tokens: int, tokens: int, seconds: float) -> None:
        """Reports that the model computed `tokens` after `context_tokens` in `seconds`.

        `resume(plan=True)` uses these measurements; without any it assumes 10,000 tokens/s."""
        self.namespace.observe_prefill(context_tokens, tokens, max(1, round(seconds * 1e9)))

    def _on_forward(self, model: Any, args: Any, kwargs: Dict[str, Any]) -> None:
        if args:
            kwargs = {**dict(zip(self._names, args)), **kwargs}
        cache = kwargs.get("past_key_values")
        hooked: Any = self._model()
        if isinstance(cache, TieredCache) and cache.tiers is self and hooked is model:
            cache.on_forward(kwargs.get("input_ids"), kwargs, model.training)

    def stats(self) -> Dict[str, float]:
        """Returns the store's statistics."""
        return self.store.stats()

    @property
    def level(self) -> int:
        """The highest durability level of the store."""
        has_disk = self.store.stats()["disk_engine"] != kvtier.IO_NONE
        return kvtier.LEVEL_DURABLE if has_disk else kvtier.LEVEL_RAM

    def close(self, timeout: Optional[float] = None) -> None:
        """Removes the hook, waits for transfers, and closes the store if it was opened from a spec.

        Raises `BusyError` after `timeout` seconds; `close` can then be called again."""
        self._hook.remove()
        try:
            self.namespace.close()
            if self._runtime is not None:
                self.store.close(timeout)
                self._close_runtime(timeout)
        except kvtier.ForkedError as error:
            raise with_advice(error) from None

    def _close_runtime(self, timeout: Optional[float]) -> None:
        if self._device is not None:
            self._device.close(timeout)
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
