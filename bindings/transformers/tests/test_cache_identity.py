"""Identity of KV: arguments of passes, changes of the model, and interrupted transfers."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any, Dict, List, Optional, Type

import kvtier
import pytest
from cache_models import ids, make, no_leaked_handles, step  # noqa: F401
from kvtier._errors import make as make_error

import torch  # isort: skip
from kvtier_transformers import Tiers, cache_offload, fingerprint  # isort: skip
from kvtier_transformers import cache as cache_full  # isort: skip
from kvtier_transformers._planes import Transfer  # isort: skip
from kvtier_transformers.fingerprint import adapters_of  # isort: skip
from transformers import DynamicCache  # isort: skip

STORE = "store(host=64MiB)"


def test_reused_input_tensor_stores_each_token() -> None:
    """Decoding loops often write each token to the same tensor."""
    model, tokens = make("llama"), ids(260)
    with Tiers(model, STORE) as tiers:
        cache, one = tiers.cache(), torch.zeros((1, 1), dtype=torch.long)
        for at in range(260):
            step(model, cache, one.copy_(tokens[:, at:at + 1]))
        cache.settle()
        assert tiers.lookup(tokens) == 256 and tiers.lookup([int(tokens[0, 63])] * 64) == 0


def test_inconsistent_masks_are_not_stored() -> None:
    model, tokens = make("llama"), ids(40)
    mask = torch.ones_like(tokens)
    left = mask.clone()
    left[:, :10] = 0
    holes = mask[:, :10].clone()
    holes[0, 3:6] = 0
    with Tiers(model, STORE) as tiers, torch.no_grad():
        cache = tiers.cache()
        model(tokens, left, past_key_values=cache)  # positional mask
        assert cache.unknown
        for first, second in ((holes, mask), (mask[:, :10], mask[:, 10:]), (None, left)):
            cache = tiers.cache()
            model(tokens[:, :10], attention_mask=first, past_key_values=cache)
            model(tokens[:, 10:], attention_mask=second, past_key_values=cache)
            assert "mask" in cache.unknown or "position" in cache.unknown
        assert tiers.lookup(tokens) == 0
    model = make("gemma3")
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens,
             attention_mask={"full_attention": None, "sliding_attention": None})
        assert "mask" in cache.unknown and tiers.lookup(tokens) == 0


def test_padding_in_chunks_survives_crop_and_reorder() -> None:
    """Recorded masks that are not appended yet follow crops and beams."""
    model, tokens = make("llama"), ids(30, 2)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with Tiers(model, STORE, chunk_tokens=32) as tiers:
        cache = tiers.cache()
        for at in (slice(0, 3), slice(3, 12), slice(12, 30)):
            step(model, cache, tokens[:, at], attention_mask=mask[:, :at.stop],
                 position_ids=positions[:, at])
        cache.crop(-8)
        cache.reorder_cache(torch.tensor([1, 1]))
        more = torch.cat([tokens[[1, 1], :22], ids(20, 2, seed=4)], 1)
        mask = torch.cat([mask[[1, 1], :22], torch.ones((2, 20), dtype=torch.long)], 1)
        step(model, cache, more[:, 22:], attention_mask=mask,
             position_ids=(mask.cumsum(1) - 1)[:, 22:])
        assert not cache.unknown and cache.save() == [32, 32]
        assert [tiers.lookup(row[5:]) for row in more.tolist()] == [32, 32]


@pytest.mark.parametrize("more", [{"is_causal": False}, {"adapter_names": ["a"]},
                                  {"pixel_values": [torch.zeros(2)]}])
def test_passes_with_other_arguments_are_not_stored(more: Dict[str, Any]) -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens, **more)
        assert next(iter(more)) in cache.unknown
        with pytest.raises(kvtier.StateError, match="does not depend on its tokens only"):
            cache.save(tokens)
        assert tiers.lookup(tokens) == 0


def test_changed_weights_are_detected() -> None:
    with torch.inference_mode():
        assert fingerprint(make("llama"))
    model, tokens = make("llama"), ids(40)
    seen = {fingerprint(model)}
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data.add_(1.0)  # torch's version counter misses this
    seen.add(fingerprint(model))
    model.model.rotary_emb.inv_freq.mul_(2.0)  # a buffer outside the checkpoint
    seen.add(fingerprint(model))
    assert len(seen) == 3
    with Tiers(model, STORE) as tiers:
        with torch.no_grad():
            weight.mul_(2.0)
        cache = tiers.cache()
        with pytest.raises(kvtier.StateError, match="other weights"):
            cache.resume(tokens)
        step(model, cache, tokens)
        assert "other weights" in cache.unknown and tiers.lookup(tokens) == 0
        model.set_attn_implementation("eager")
        assert "attention implementation" in tiers.changed


class Adapted(torch.nn.Linear):
    """A layer with the attributes of peft's layers."""

    disable_adapters = False
    active_adapters = ["a"]
    merged_adapters: "list[str]" = []

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scaling = {"a": 1.0, "b": 2.0}


def test_adapter_state_changes_the_identity() -> None:
    model = make("llama")
    assert adapters_of(model) is None
    model.extra = Adapted()
    digests = [adapters_of(model)]
    for name, value in (("active_adapters", ["b"]), ("scaling", {"a": 1.0, "b": 4.0}),
                        ("merged_adapters", ["b"]), ("disable_adapters", True)):
        setattr(model.extra, name, value)
        digests.append(adapters_of(model))
    assert len(set(digests)) == 5 and None not in digests


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 6,
     "long_factor": [4.0] * 6, "original_max_position_embeddings": 32}])
def test_length_dependent_rope_is_rejected(rope: Dict[str, Any]) -> None:
    model = make("llama", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(kvtier.UnsupportedError, match="rope_type"):
        Tiers(model, STORE)


def test_copied_cache_is_independent() -> None:
    model, tokens = make("llama"), ids(60)
    one, other = (torch.cat([tokens, ids(40, seed=seed)], 1) for seed in (7, 8))
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens)
        copied = copy.deepcopy(cache)
        step(model, cache, one[:, 60:])
        step(model, copied, other[:, 60:])
        assert cache.save() == copied.save() == [96]
        for whole in (one, other):
            found = tiers.cache()
            assert found.resume(whole) == 96
            torch.testing.assert_close(step(model, found, whole[:, 96:])[:, -1],
                                       step(model, None, whole)[:, -1])
        with pytest.raises(kvtier.StateError, match="resident_layers"):
            copy.deepcopy(tiers.cache(resident_layers=2))
        with pytest.raises(TypeError, match="copied"):
            copy.deepcopy(tiers.store)
        twin, third = copy.deepcopy(model), ids(40, seed=9)
        step(twin, cache := tiers.cache(), third)  # the copy's weights may differ
        assert "around" in cache.unknown and tiers.lookup(third) == 0


def test_failed_pass_stops_storing() -> None:
    model, tokens = make("llama"), ids(64)

    def fail(*_: Any) -> None:
        raise ValueError("no memory")

    with Tiers(model, STORE) as tiers:
        for mode in (None, 2):
            cache = tiers.cache(resident_layers=mode)
            step(model, cache, tokens[:, :20])
            hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="no memory"):
                step(model, cache, tokens[:, 20:21])
            hook.remove()
            if mode is None:  # continues like the stock cache, but stores nothing
                step(model, cache, tokens[:, 20:21])
                with pytest.raises(kvtier.StateError, match="are unknown"):
                    cache.save()
            else:
                with pytest.raises(kvtier.StateError, match="failed midway"):
                    step(model, cache, tokens[:, 20:21])
        assert tiers.lookup(tokens) == 16


def test_full_queue_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("llama"), ids(60)
    calls = {"to_store": 0, "from_store": 0}
    for name in calls:
        def full(*args: Any, name: str = name, real: Any = getattr(cache_offload, name),
                 **more: Any) -> Any:
            calls[name] += 1
            if calls[name] % 3 == 0:
                raise make_error(kvtier.abi.KVT_E_AGAIN, "full")
            return real(*args, **more)
        monkeypatch.setattr(cache_offload, name, full)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache(resident_layers=2)
        step(model, cache, tokens[:, :40])
        step(model, cache, tokens[:, 40:])
        assert cache.save() == [48] and min(calls.values()) > 3
        other = tiers.cache(resident_layers=2)
        assert other.resume(tokens) == 48


class Gets:
    """Records all gets, and makes one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: Optional[BaseException]) -> None:
        self.made: List[Transfer] = []
        self._at, self._error = at, error
        for module in (cache_full, cache_offload):
            patch.setattr(module, "from_store", self._get)

    def _get(self, *args: Any, real: Any = cache_full.from_store, **more: Any) -> Transfer:
        if len(self.made) == self._at and self._error is not None:
            raise self._error
        self.made.append(real(*args, **more))
        return self.made[-1]


def interrupt(patch: pytest.MonkeyPatch, at: int) -> None:
    """Simulates Ctrl-C during wait number `at`."""
    real, calls = kvtier.Op.wait, iter(range(1 << 30))

    def wait(*args: Any, **more: Any) -> bool:
        if next(calls) == at:
            raise KeyboardInterrupt
        return real(*args, **more)

    patch.setattr(kvtier.Op, "wait", wait)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", [None, 2])
@pytest.mark.parametrize("status, raised", [
    (None, KeyboardInterrupt), (kvtier.abi.KVT_E_AGAIN, kvtier.AgainError),
    (kvtier.abi.KVT_E_CLOSED, kvtier.ClosedError)])
def test_interrupted_resume_leaves_an_empty_cache(
        status: Optional[int], raised: Type[BaseException], mode: Optional[int], name: str) -> None:
    model, tokens = make(name, num_hidden_layers=4), ids(60, rows=2)
    with Tiers(model, STORE) as tiers:
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [48, 48]
        cache, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
        with pytest.MonkeyPatch.context() as patch:
            error = None if status is None else make_error(status, "no")
            gets = Gets(patch, 1 if mode is None else 3, error)
            if error is None:
                interrupt(patch, 1 if mode is None else 4)
            with pytest.raises(raised):
                cache.resume(tokens)
        assert cache.get_seq_length() == 0 and gets.made
        assert all(get.op.closed for get in gets.made)  # no get writes to a freed buffer
        assert torch.equal(step(model, cache, tokens), step(model, stock, tokens))
        cache.reset()
        assert cache.resume(tokens) == 48


def test_resume_waits_for_its_own_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one get may be in progress; the others wait for it."""
    model, tokens = make("llama"), ids(60, rows=3)
    real_wait, real_get, in_progress = kvtier.Op.wait, cache_full.from_store, set()

    def wait(op: kvtier.Op, *args: Any) -> bool:
        in_progress.discard(op)
        return real_wait(op, *args)

    def get(*args: Any, **more: Any) -> Transfer:
        if in_progress:
            raise make_error(kvtier.abi.KVT_E_AGAIN, "full")
        transfer = real_get(*args, **more)
        in_progress.add(transfer.op)
        return transfer

    with Tiers(model, STORE) as tiers:
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [48, 48, 48]
        monkeypatch.setattr(kvtier.Op, "wait", wait)
        monkeypatch.setattr(cache_full, "from_store", get)
        assert tiers.cache().resume(tokens) == 48


@pytest.mark.parametrize("how", ["rejected", "interrupted"])
def test_gets_before_a_failed_one_are_waited_for(how: str) -> None:
    """They write to buffers that another layer uses next."""
    model, tokens = make("llama", num_hidden_layers=4), ids(60, rows=2)
    with Tiers(model, STORE) as tiers:
        step(model, full := tiers.cache(), tokens)
        step(model, cache := tiers.cache(resident_layers=2), tokens)
        cache.settle()
        cache._ring.truncate(0)  # the ring is empty: all layers are loaded again
        layer = cache.layers[0]
        with pytest.MonkeyPatch.context() as patch:
            rejected = how == "rejected"
            gets = Gets(patch, 1, make_error(kvtier.abi.KVT_E_CLOSED, "no") if rejected else None)
            if not rejected:
                interrupt(patch, 1)
            with pytest.raises(kvtier.ClosedError if rejected else KeyboardInterrupt):
                layer.whole()
        # Only row 0 was loaded, so the slot must not count as filled.
        for ours, want in zip(layer.whole(), full.layers[0].pair):
            assert torch.equal(ours, want[:, :, :60])
        assert all(get.op.closed for get in gets.made)
        with pytest.MonkeyPatch.context() as patch:
            cache._ring.truncate(0)
            gets = Gets(patch, 1, make_error(kvtier.abi.KVT_E_CLOSED, "no"))
            with pytest.raises(kvtier.ClosedError):
                layer.fetch()
        cache._ring.truncate(0)
        assert [get.op.closed for get in gets.made] == [True]


def delay_puts(patch: pytest.MonkeyPatch, ready: kvtier.ReadyEvent) -> List[kvtier.Op]:
    """Makes new puts wait for the event `ready`. Returns the list of their ops."""
    made: List[kvtier.Op] = []
    real = kvtier.Session.put

    def put(*args: Any, **more: Any) -> kvtier.Op:
        made.append(real(*args, ready=ready, **more))
        return made[-1]

    patch.setattr(kvtier.Session, "put", put)
    return made


def test_interrupted_wait_keeps_puts_tracked() -> None:
    """An interrupted wait must not let later steps overwrite buffers that puts still read."""
    model, tokens = make("llama"), ids(700)
    with Tiers(model, STORE) as tiers, kvtier.ReadyEvent() as ready:
        cache, stock = tiers.cache(), DynamicCache(config=model.config)
        with pytest.MonkeyPatch.context() as patch:
            delay_puts(patch, ready)
            step(model, cache, tokens)
        before = cache.layers[0].pair
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, 0)
            with pytest.raises(KeyboardInterrupt):
                cache.crop(-100)
        threading.Timer(0.3, ready.signal).start()
        cache.crop(-100)
        step(model, cache, ids(100, seed=9))
        assert all(ours is buffer for ours, buffer in zip(cache.layers[0].pair, before))
        cache.settle()
        fresh = tiers.cache()
        assert fresh.resume(tokens) == 688
        step(model, stock, tokens)
        for ours, want in zip(fresh.layers, stock.layers):
            assert torch.equal(ours.keys, want.keys[:, :, :688])


@pytest.mark.parametrize("at", range(4))
def test_interrupted_settle_can_be_repeated(at: int) -> None:
    model, tokens = make("llama", num_hidden_layers=4), ids(60, rows=2)
    with Tiers(model, STORE) as tiers:
        cache, stock = tiers.cache(resident_layers=2), DynamicCache(config=model.config)
        step(model, cache, tokens[:, :40]), step(model, stock, tokens[:, :40])
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(KeyboardInterrupt):
                cache.settle()
        cache.settle()
        assert [layer.base for layer in cache.layers] == [32] * 4
        assert torch.equal(step(model, cache, tokens[:, 40:]), step(model, stock, tokens[:, 40:]))
        assert cache.save() == [48, 48] and not cache.stats()["failed_puts"]


@pytest.mark.parametrize("mode", [None, 2])
@pytest.mark.parametrize("times", [1, 1 << 30])
def test_interrupted_reset_leaves_an_empty_cache(times: int, mode: Optional[int]) -> None:
    model, tokens, other = make("llama", num_hidden_layers=4), ids(60, rows=2), ids(60, 2, seed=5)
    with Tiers(model, STORE) as tiers, kvtier.ReadyEvent() as ready:
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [48, 48]
        cache, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
        with pytest.MonkeyPatch.context() as patch:
            made, calls = delay_puts(patch, ready), iter(range(1 << 30))
            real = kvtier.Op.wait

            def wait(op: kvtier.Op, *args: Any) -> bool:
                if op in made and next(calls) < times:
                    raise KeyboardInterrupt
                return real(op, *args)

            patch.setattr(cache_offload.Ring, "put_started",
                          lambda ring, layer: ring._putting.append(layer))
            step(model, cache, other)
            patch.setattr(kvtier.Op, "wait", wait)
            if mode is None:
                cache.reset()  # does not wait: the puts keep their buffers
            else:
                with pytest.raises(KeyboardInterrupt):
                    cache.reset()
        assert cache.get_seq_length() == 0 and not cache._rows.sessions and not cache._rows.recorded
        threading.Timer(0.3, ready.signal).start()
        cache.reset()
        assert cache.resume(tokens) == 48
        step(model, stock, tokens[:, :48])
        assert torch.equal(step(model, cache, tokens[:, 48:]), step(model, stock, tokens[:, 48:]))
        while not all(op.closed or op.info().released for op in made):
            time.sleep(0.01)
        fresh, stock = tiers.cache(), DynamicCache(config=model.config)
        assert fresh.resume(other) == 48  # its puts completed, and nothing overwrote their buffers
        step(model, stock, other[:, :48])
        assert torch.equal(step(model, fresh, other[:, 48:]), step(model, stock, other[:, 48:]))


def test_interrupted_save_blocks_reuse_of_its_buffers() -> None:
    model, tokens = make("llama", num_hidden_layers=4), ids(60, rows=2)
    with Tiers(model, STORE) as tiers, kvtier.ReadyEvent() as ready:
        cache = tiers.cache(resident_layers=2)
        step(model, cache, tokens)
        cache.settle()
        with pytest.MonkeyPatch.context() as patch:
            made, real = delay_puts(patch, ready), kvtier.Op.wait

            def wait(op: kvtier.Op, *args: Any) -> bool:
                if op in made:
                    raise KeyboardInterrupt
                return real(op, *args)

            patch.setattr(kvtier.Op, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                cache.save()
        assert len(made) == 2 and not any(op.info().released for op in made)
        threading.Timer(0.3, ready.signal).start()
        cache.crop(-1)
        assert all(op.closed for op in made)
        assert cache.save() == [48, 48]
