"""TieredCache gives the logits of the stock cache, bit for bit, under all cache operations."""

from __future__ import annotations

import random
from typing import Any, Optional

import pytest
from cache_models import MAKERS, Counter, ids, make, no_leaked_handles, step  # noqa: F401

import torch
from kvtier_transformers import Tiers
from transformers import DynamicCache

STORE = "store(host=32MiB)"
MODES = [None, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAKERS)
def test_logits_equal_the_stock_cache(name: str, attention: str, dtype: torch.dtype,
                                      mode: Optional[int]) -> None:
    layers = 6 if name == "gemma3" else 3
    model = make(name, dtype, num_hidden_layers=layers, attn_implementation=attention)
    with Tiers(model, STORE) as tiers:
        ours, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
        tokens = ids(37, rows=2)
        for _ in range(30):
            a, b = step(model, ours, tokens), step(model, stock, tokens)
            assert torch.equal(a, b)
            tokens = b[:, -1:].argmax(-1)
        assert ours.unknown == "" and ours.get_seq_length() == stock.get_seq_length() == 66
        ours.settle()
        assert ours.stats()["failed_puts"] == 0
        assert mode is None or ours.stats()["fetched_layers"] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MAKERS)
def test_greedy_generation_equals_the_stock_cache(name: str, mode: Optional[int]) -> None:
    model, prompt = make(name, num_hidden_layers=3), ids(33, rows=2, seed=3)
    want = model.generate(prompt, max_new_tokens=40, do_sample=False)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache(resident_layers=mode)
        got = model.generate(prompt, max_new_tokens=40, do_sample=False, past_key_values=cache)
        assert torch.equal(got, want) and cache.unknown == ""
        assert cache.save(got) == [64, 64]  # 72 tokens: the last of 73 was not computed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_beam_search_equals_the_stock_cache(name: str, mode: Optional[int]) -> None:
    model, prompt = make(name, num_hidden_layers=3), ids(20, rows=2, seed=4)
    how = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False}
    want = model.generate(prompt, **how)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache(resident_layers=mode)
        assert torch.equal(model.generate(prompt, **how, past_key_values=cache), want)
        assert cache.unknown == "" and cache.save() == [48] * 6
        # Each beam stored its own tokens: resuming from them equals computing from scratch.
        beams = torch.tensor([list(line.tokens) for line in cache._rows._row_sessions])
        assert beams.shape == (6, 49) and len(set(map(tuple, beams.tolist()))) >= 2
        again, fresh = tiers.cache(), DynamicCache(config=model.config)
        assert again.resume(beams) == 48
        step(model, fresh, beams[:, :48])
        a, b = step(model, again, beams[:, 48:]), step(model, fresh, beams[:, 48:])
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_repeat_select_and_crop_equal_the_stock_cache(name: str, mode: Optional[int]) -> None:
    model = make(name, num_hidden_layers=3)
    with Tiers(model, STORE) as tiers:
        ours, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
        tokens = ids(40, rows=2, seed=5)
        for cache in (ours, stock):
            step(model, cache, tokens)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([0, 3, 5]))
        one = ids(7, rows=3, seed=6)
        assert torch.equal(step(model, ours, one), step(model, stock, one))
        for count in (3, 25):  # within the tail in torch memory, and into stored chunks
            for cache in (ours, stock):
                cache.crop(-count)
            one = ids(12, rows=3, seed=count)
            assert torch.equal(step(model, ours, one), step(model, stock, one))
        assert ours.unknown == "" and ours.save() == [32] * 3


def test_window_layers_crop_recorded_tokens() -> None:
    model = make("gemma3")
    with Tiers(model, STORE) as tiers:
        ours, stock = tiers.cache(), DynamicCache(config=model.config)
        step(model, ours, ids(40)), step(model, stock, ids(40))
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            ours.crop(-3)
        for cache in (ours, stock):
            cache.activate_past_recording()
        for turn in range(12):
            new = ids(9, seed=turn)
            assert torch.equal(step(model, ours, new), step(model, stock, new))
            ours.crop(-4), stock.crop(-4)
        assert ours.unknown == "" and ours.get_seq_length() == 100


def test_assisted_decoding_equals_the_stock_cache() -> None:
    model, helper, prompt = make("llama"), make("llama", num_hidden_layers=1), ids(30, seed=8)
    how = {"max_new_tokens": 24, "do_sample": False, "assistant_model": helper}
    want = model.generate(prompt, **how)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        assert torch.equal(model.generate(prompt, **how, past_key_values=cache), want)
        cache.save()


def test_gradients_equal_the_stock_cache() -> None:
    model, tokens = make("llama"), ids(24, seed=9)
    grads = []
    with Tiers(model, STORE) as tiers:
        for cache in (tiers.cache(), DynamicCache(config=model.config)):
            model.zero_grad()
            for piece in tokens.split(8, 1):
                out = model(input_ids=piece, past_key_values=cache).logits
            out.sum().backward()
            grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
        assert torch.equal(*grads)
        with pytest.raises(Exception, match="no_grad"):
            model(input_ids=tokens, past_key_values=tiers.cache(resident_layers=2))


def test_inference_mode_can_be_mixed() -> None:
    model, tokens = make("llama"), ids(20)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        with torch.inference_mode():
            model(input_ids=tokens, past_key_values=cache)
        step(model, cache, ids(3))
        assert cache.get_seq_length() == 23


def test_other_device_types_are_staged() -> None:
    """Without a second device, the test declares all memory to be device memory."""
    from kvtier_transformers import _planes

    model, tokens = make("gemma3"), ids(50)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        before, _planes.HOST = _planes.HOST, ("nowhere",)
        try:
            step(model, cache, tokens)
            assert cache.save() == [48]
            again = tiers.cache()
            assert again.resume(tokens) == 48
        finally:
            _planes.HOST = before
        twin: Any = tiers.cache()
        assert twin.resume(tokens) == 48
        for a, b, c in zip(again.layers, twin.layers, cache.layers):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
            n = min(a.keys.shape[2], c.keys.shape[2]) - 2
            assert n and torch.equal(a.keys[:, :, -n:], c.keys[:, :, -n - 2:-2])


@pytest.mark.parametrize("mode", [None, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_operations_equal_the_stock_cache(name: str, mode: Optional[int]) -> None:
    numbers = random.Random(f"{name} {mode}")
    model = make(name, num_hidden_layers=4 if name == "gemma3" else 3)
    with Tiers(model, STORE, chunk_tokens=4) as tiers:
        for _ in range(3):
            ours, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
            ours.activate_past_recording(), stock.activate_past_recording()
            rows, since = 2, 0
            for turn in range(25):
                action = numbers.choice(["one", "one", "one", "some", "crop", "pick", "save"])
                if action in ("one", "some"):
                    new = 1 if action == "one" else numbers.randint(2, 30)
                    tokens = ids(new, rows, numbers.randrange(10**6))
                    assert torch.equal(step(model, ours, tokens), step(model, stock, tokens))
                    since += new
                elif action == "crop" and ours.get_seq_length():
                    count = numbers.randint(0, since)
                    ours.crop(-count), stock.crop(-count)
                    since = 0
                elif action == "pick" and ours.get_seq_length():
                    order = torch.tensor(numbers.choices(range(rows), k=numbers.randint(1, 3)))
                    rows = len(order)
                    ours.batch_select_indices(order), stock.batch_select_indices(order)
                elif ours.get_seq_length():
                    kept = ours.get_seq_length() // 4 * 4
                    assert ours.save() == [kept] * rows
                    again = tiers.cache()  # the stored KV belongs to the recorded tokens
                    stored = torch.tensor([list(line.tokens) for line in ours._rows._row_sessions])
                    assert again.resume(stored) in (kept, kept - 1)
                    for a, b in zip(again.layers, stock.layers):
                        n = min(again.get_seq_length(), b.keys.shape[2])
                        if name == "llama" and n:
                            assert torch.allclose(a.keys[:, :, :n], b.keys[:, :, :n], atol=1e-4)
                assert ours.get_seq_length() == stock.get_seq_length() and ours.unknown == ""


def test_generate_computes_the_prompt_once() -> None:
    model, prompt = make("llama"), ids(45)
    with Tiers(model, STORE) as tiers, Counter(model) as counter:
        cache = tiers.cache()
        model.generate(prompt, max_new_tokens=3, do_sample=False, past_key_values=cache)
        assert counter.passes == [45, 1, 1]
