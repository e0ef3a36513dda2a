"""Tokens that kvpress keeps: the family of tests/data/sparse/kvpress.json.

`press.compress()` runs without a model. It gets a namespace with the attributes that it reads, the
keys of a case and the attention of its queries. The values are the positions of the tokens, so the
returned values are the kept positions.
"""

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch

from portable import Missing, attention, inputs, packed

LAYERS = 4


def versions():
    try:
        import kvpress  # noqa: F401
    except (ImportError, PackageNotFoundError) as error:
        raise Missing(f"kvpress: {error}") from error
    return {name: version(name) for name in ("kvpress", "transformers", "torch")}


def base(name, tokens, heads, key_heads, spec, **more):
    return {"name": name, "ask": "evict", "spec": spec, "heads": heads, "key_heads": key_heads,
            "dim": 16, "tokens": tokens, "gains": [4.0, 2.0, 6.0], "period": 0, "layers": LAYERS,
            "layer": 0, **more}  # fmt: skip


def cases():
    shapes = [(4, 4, 200), (4, 2, 333), (8, 2, 128), (6, 1, 257)]
    for n, (heads, key_heads, tokens) in enumerate(shapes):
        for ratio in (0.25, 0.5, 0.9):
            one = lambda press, spec, **more: base(
                f"{press} {n} {ratio}", tokens, heads, key_heads, spec, press=press, ratio=ratio, **more
            )
            yield one("Knorm", f"knorm(ratio={ratio})", period=32)
            yield one("KeyDiff", f"keydiff(ratio={ratio})", period=32, least=5e-4)
            yield one("TOVA", f"tova(ratio={ratio})")
            stay = int(tokens * (1 - ratio))
            yield one("StreamingLLM", f"streaming(sinks=4,recent={stay - 4})")
            if stay < 16:
                continue
            for window, kernel in ((16, 5), (8, 7)):
                yield one("SnapKV", f"snapkv(ratio={ratio},window={window},kernel={kernel})",
                          window=window, kernel=kernel)  # fmt: skip
            yield one("AdaKV", f"adakv(ratio={ratio},window=16)", window=16, kernel=5, safe=0.2)
            yield one("AdaKV", f"adakv(ratio={ratio},window=16,safe=0.6)", window=16, kernel=5, safe=0.6)
            for layer in range(LAYERS):
                yield one("PyramidKV", f"pyramidkv(ratio={ratio},window=8,beta=10)",
                          window=8, kernel=5, beta=10, layer=layer)  # fmt: skip
    yield base("Knorm one", 50, 2, 2, "knorm(ratio=0.99)", press="Knorm", ratio=0.99)


def press_of(case):
    import kvpress

    name, ratio = case["press"], case["ratio"]
    if name in ("Knorm", "KeyDiff", "TOVA", "StreamingLLM"):
        return getattr(kvpress, name + "Press")(ratio)
    snap = {"window_size": case["window"], "kernel_size": case["kernel"]}
    if name == "AdaKV":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, **snap), case["safe"])
    if name == "PyramidKV":
        return kvpress.PyramidKVPress(ratio, beta=case["beta"], **snap)
    return kvpress.SnapKVPress(ratio, **snap)


def run(case, watch):
    press = press_of(case)
    q, k = inputs(case)
    tokens, heads = case["tokens"], case["key_heads"]
    config = SimpleNamespace(
        num_attention_heads=case["heads"], num_key_value_heads=heads,
        num_hidden_layers=LAYERS, _attn_implementation="sdpa",
    )  # fmt: skip
    module = SimpleNamespace(head_dim=case["dim"], layer_idx=case["layer"], config=config)
    values = torch.arange(tokens, dtype=torch.float32)[None, None, :, None].expand_as(k).contiguous()
    hidden = torch.zeros(1, tokens, 1)
    # All tokens of the window have equal scores, so it does not matter which are kept for certain.
    watch.free = (0,) if case["press"] == "AdaKV" and is_safe_in_window(case) else ()
    with watch:
        _, kept = press.compress(module, hidden, k, values, attention(q, k), {})
    if case["press"] == "AdaKV":
        _, gone_heads, gone = module.masked_key_indices
        stay = [set(range(tokens)) for _ in range(heads)]
        for head, token in zip(gone_heads.tolist(), gone.tolist()):
            stay[head].remove(token)
        return {"lists": [packed(one) for one in stay]}
    return {"lists": [packed(kept[0, head, :, 0].tolist()) for head in range(heads)]}


def is_safe_in_window(case):
    return int(int(case["tokens"] * (1 - case["ratio"])) * case["safe"]) < case["window"]
