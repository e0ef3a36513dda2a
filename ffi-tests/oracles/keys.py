#!/usr/bin/env python3
"""Keys by the definition of docs/internals/keys.md: the oracle of tests/store/keys.rs.

    keys.py --write FILE    writes the vectors
    keys.py --check FILE    computes every result in FILE again from its inputs

Shares no code with the library. BLAKE3 is written here from its specification, and checked with the
published test vectors and with the package blake3 if that is installed.
"""

import argparse
import json
import struct
import sys

MASK = 0xFFFFFFFF
IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
COLUMNS_THEN_DIAGONALS = [
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
]  # fmt: skip
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
KEYED_HASH = 16
DERIVE_KEY_CONTEXT, DERIVE_KEY_MATERIAL = 32, 64
CHUNK_BYTES = 1024


def compress(value, block, counter, length, flags):
    """The first eight words of the compression function."""
    words = list(struct.unpack("<16I", block.ljust(64, b"\0")))
    v = value + IV[:4] + [counter & MASK, counter >> 32, length, flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(COLUMNS_THEN_DIAGONALS):
            v[a] = (v[a] + v[b] + words[2 * i]) & MASK
            x = v[d] ^ v[a]
            v[d] = (x >> 16 | x << 16) & MASK
            v[c] = (v[c] + v[d]) & MASK
            x = v[b] ^ v[c]
            v[b] = (x >> 12 | x << 20) & MASK
            v[a] = (v[a] + v[b] + words[2 * i + 1]) & MASK
            x = v[d] ^ v[a]
            v[d] = (x >> 8 | x << 24) & MASK
            v[c] = (v[c] + v[d]) & MASK
            x = v[b] ^ v[c]
            v[b] = (x >> 7 | x << 25) & MASK
        words = [words[i] for i in PERMUTATION]
    return [v[i] ^ v[i + 8] for i in range(8)]


def packed(value):
    return struct.pack("<8I", *value)


def subtree(data, first, key, flags, root):
    """The chaining value of data whose first chunk has the number `first`."""
    if len(data) <= CHUNK_BYTES:
        value = key
        blocks = [data[at : at + 64] for at in range(0, len(data), 64)] or [b""]
        for i, block in enumerate(blocks):
            here = flags | (CHUNK_START if i == 0 else 0)
            if i == len(blocks) - 1:
                here |= CHUNK_END | root
            value = compress(value, block, first, len(block), here)
        return value
    # The left part is the largest power of two of chunks that is smaller than the data.
    left = CHUNK_BYTES
    while left * 2 < len(data):
        left *= 2
    pair = packed(subtree(data[:left], first, key, flags, 0)) + packed(
        subtree(data[left:], first + left // CHUNK_BYTES, key, flags, 0)
    )
    return compress(key, pair, 0, 64, flags | PARENT | root)


def blake3(data):
    return packed(subtree(data, 0, IV, 0, ROOT))


def derive_key(context, material):
    key = subtree(context.encode(), 0, IV, DERIVE_KEY_CONTEXT, ROOT)
    return packed(subtree(material, 0, key, DERIVE_KEY_MATERIAL, ROOT))


def keyed_hash(key, data):
    return packed(subtree(data, 0, list(struct.unpack("<8I", key)), KEYED_HASH, ROOT))


# From test_vectors.json of BLAKE3: inputs 0, 1 .. 250, 0, 1 .. of several lengths.
OFFICIAL = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
}
OFFICIAL_CONTEXT = "BLAKE3 2019-12-27 16:29:52 test vectors context"
OFFICIAL_KEY = b"whats the Elvish word for friend"
OFFICIAL_KEYED_EMPTY = "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"
OFFICIAL_DERIVED_EMPTY = "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"


def check_blake3():
    ramp = bytes(i % 251 for i in range(10_000))
    for length, digest in OFFICIAL.items():
        assert blake3(ramp[:length]).hex() == digest, length
    assert derive_key(OFFICIAL_CONTEXT, b"").hex() == OFFICIAL_DERIVED_EMPTY
    assert keyed_hash(OFFICIAL_KEY, b"").hex() == OFFICIAL_KEYED_EMPTY
    try:
        import blake3 as package
    except ImportError:
        return "BLAKE3 agrees with its vectors"
    for length in [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 5000, 8192, 10_000]:
        data = ramp[:length]
        assert blake3(data) == package.blake3(data).digest(), length
        theirs = package.blake3(data, derive_key_context=OFFICIAL_CONTEXT).digest()
        assert derive_key(OFFICIAL_CONTEXT, data) == theirs, length
        assert keyed_hash(OFFICIAL_KEY, data) == package.blake3(data, key=OFFICIAL_KEY).digest(), length
    return f"BLAKE3 agrees with its vectors and the package blake3 {package.__version__}"


# The derivation.

CONTEXTS = {
    "namespace": "kvtier 2026-11-21 v1 namespace",
    "layout": "kvtier 2026-11-21 v1 layout",
    "private": "kvtier 2026-11-21 v1 private",
    "block": "kvtier 2026-11-23 v1 block",
    "object": "kvtier 2026-11-23 v1 object",
    "object secret": "kvtier 2026-11-23 v1 object secret",
}
TAGS = {
    "model": 1,
    "weights": 2,
    "layout": 3,
    "lora": 4,
    "media": 5,
    "salt": 6,
    "shard": 7,
    "recipe": 8,
}
FIRST_EXTRA_TAG = 0x80000000


def encoded(fields):
    """Encodes fields in the order of their tags."""
    parts = [struct.pack("<I", len(fields))]
    for tag in sorted(fields):
        parts += [struct.pack("<IQ", tag, len(fields[tag])), fields[tag]]
    return b"".join(parts)


def identity_material(case):
    fields = {}
    for name, value in case["fields"].items():
        fields[TAGS[name]] = struct.pack("<II", *value) if name == "shard" else bytes.fromhex(value)
    for tag, value in case["extra"]:
        assert tag >= FIRST_EXTRA_TAG and tag not in fields, tag
        fields[tag] = bytes.fromhex(value)
    return encoded(fields)


def identity_results(case):
    material = identity_material(case)
    key = derive_key(CONTEXTS["namespace"], material)
    return {"material": material.hex(), "key": key.hex()}


DTYPES = ["bytes", "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
RULES = ["full", "window", "state"]
NUMBERS = ["window", "kv_heads", "k_bytes", "v_bytes", "state_bytes"]


def layout_bytes(layout):
    groups = sorted(layout["groups"], key=lambda group: min(group["layers"]))
    layers = sum(len(group["layers"]) for group in groups)
    out = b"KVTL" + struct.pack("<IIHH", 1, layout["chunk_tokens"], layers, len(groups))
    group_of = [None] * layers
    for at, group in enumerate(groups):
        out += struct.pack("<BBH", DTYPES.index(group["dtype"]), RULES.index(group["rule"]), 0)
        out += struct.pack("<6I", *(group.get(name, 0) for name in NUMBERS), 0)
        for layer in group["layers"]:
            assert group_of[layer] is None, layer
            group_of[layer] = at
    return out + bytes(group_of)


def layout_results(case):
    data = layout_bytes(case["layout"]) if case["layout"] else bytes.fromhex(case["bytes"])
    return {"bytes": data.hex(), "fingerprint": derive_key(CONTEXTS["layout"], data).hex()}


def tokens_of(case):
    """The tokens of a case: token i is first + i * step, modulo 2^32."""
    count, first, step = (case["tokens"][name] for name in ["count", "first", "step"])
    return [(first + i * step) & MASK for i in range(count)]


def token_bytes(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


def chain_results(case):
    tokens, each = tokens_of(case), case["chunk_tokens"]
    media = {chunk: bytes.fromhex(digest) for chunk, digest in case["media"]}
    key, hashes, keys = bytes.fromhex(case["namespace"]), [], []
    for i in range(len(tokens) // each):
        hashes.append(blake3(token_bytes(tokens[i * each : (i + 1) * each])))
        key = blake3(key + hashes[i] + media.get(i, b""))
        keys.append(key)
    return {"first_hash": hashes[0].hex() if hashes else None, "keys": [key.hex() for key in keys]}


def private_results(case):
    fields = {
        1: bytes.fromhex(case["parent"]),
        2: bytes.fromhex(case["session"]),
        3: blake3(token_bytes(tokens_of(case))),
    }
    if case["extra"] is not None:
        fields[4] = bytes.fromhex(case["extra"])
    material = encoded(fields)
    key = derive_key(CONTEXTS["private"], material)
    return {"material": material.hex(), "key": key.hex()}


def block_results(case):
    material = encoded({1: bytes.fromhex(case["namespace"]), 2: bytes.fromhex(case["block"])})
    return {"material": material.hex(), "key": derive_key(CONTEXTS["block"], material).hex()}


def object_results(case):
    shape = struct.pack("<QII", case["object_bytes"], case["first"], case["layers"])
    material = encoded({
        1: bytes.fromhex(case["namespace"]),
        2: bytes.fromhex(case["layout"]),
        3: bytes.fromhex(case["chunk"]),
        4: shape,
        5: bytes([case["codec"]]),
        6: bytes([case["sealed"]]),
    })  # fmt: skip
    if case["secret"] is None:
        key = derive_key(CONTEXTS["object"], material)
    else:
        secret = derive_key(CONTEXTS["object secret"], bytes.fromhex(case["secret"]))
        key = keyed_hash(secret, material)
    return {"material": material.hex(), "key": key.hex(), "name": key[:20].hex()}


def media_results(case):
    """The extra digest of each chunk in which an item of media starts."""
    each, chunks = case["chunk_tokens"], {}
    for token, digest in case["media"]:
        chunks.setdefault(token // each, []).append((token % each, bytes.fromhex(digest)))
    extras = []
    for chunk, parts in sorted(chunks.items()):
        if len(parts) == 1:
            extra = parts[0][1]
        else:
            extra = blake3(b"".join(struct.pack("<I", place) + digest for place, digest in parts))
        extras.append([chunk, extra.hex()])
    return {"extras": extras}


RESULTS = {
    "identities": identity_results,
    "layouts": layout_results,
    "chains": chain_results,
    "private": private_results,
    "blocks": block_results,
    "media": media_results,
    "objects": object_results,
}


# The cases for which --write computes results.


def identity(name, extra=(), shard=None, **fields):
    fields = {field: value.hex() for field, value in fields.items()}
    if shard:
        fields["shard"] = shard
    return {"name": name, "fields": fields, "extra": [[tag, value.hex()] for tag, value in extra]}


def identities(layout):
    full = {
        "model": b"org/model-8b",
        "weights": bytes(range(32)),
        "layout": layout,
        "lora": b"adapter-7:1.5",
        "media": b"\xaa" * 32,
        "salt": b"tenant-1",
        "recipe": b"minference(budget=25%)",
    }
    own = [(0x80000000, b"x"), (0x80000001, b""), (0xFFFFFFFF, bytes(range(256)))]
    yield identity("nothing")
    yield identity("example", model=b"org/model-8b", layout=layout, salt=b"tenant-1", shard=[0, 2])
    yield identity("everything", own, [3, 4], **full)
    yield identity("everything, extra in another order", [own[2], own[0], own[1]], [3, 4], **full)
    for field in full:
        rest = {name: value for name, value in full.items() if name != field}
        yield identity(f"{field} absent", [], [0, 1], **rest)
        if field != "layout":
            yield identity(f"{field} empty", [], [0, 1], **{**full, field: b""})
            yield identity(f"{field} alone", **{field: b"value"})
            yield identity(f"{field} alone, empty", **{field: b""})
    yield identity("shard absent", **full)
    yield identity("shard alone", shard=[0, 1])
    yield identity("largest shard", shard=[0xFFFFFFFE, 0xFFFFFFFF])
    yield identity("ab then c", model=b"ab", weights=b"c")
    yield identity("a then bc", model=b"a", weights=b"bc")
    yield identity("an extra field alone", [(0x80000000, b"value")])
    yield identity("an extra field alone, empty", [(0x80000000, b"")])
    yield identity("the most extra fields", [(0x80000000 + i * i, bytes([i])) for i in range(64)])
    yield identity("longer than a chunk of BLAKE3", model=b"m" * 3000)


def tokens(count, first=1, step=1):
    return {"count": count, "first": first, "step": step}


def chains(namespace):
    def chain(name, each, count, media=(), first=1, step=1):
        return {
            "name": name,
            "namespace": namespace,
            "chunk_tokens": each,
            "tokens": tokens(count, first, step),
            "media": [[chunk, bytes([byte] * 32).hex()] for chunk, byte in media],
        }

    yield chain("example", 16, 40)
    yield chain("example with media", 16, 40, [(1, 0xAA)])
    yield chain("media in all chunks, and beyond", 16, 64, [(0, 1), (1, 2), (2, 3), (3, 4), (9, 5)])
    yield chain("no full chunk", 256, 255)
    step = 2654435761
    for each in [1, 2, 15, 16, 17, 32, 64, 128]:
        yield chain(f"{each} tokens", each, each * 37, [(3, 0xBB)], 17, step)
    for each in [255, 256, 257, 512, 513, 768, 1024, 1280, 1536, 1792, 2048, 2304]:
        yield chain(f"{each} tokens", each, each * 10 + 7, [(5, 0xCC)], 29, step)
    yield chain("the largest chunk", 65536, 65536, (), 3, step)


def privates(parent):
    def private(name, count, extra=None, session=b"session-1", parent=parent):
        return {
            "name": name,
            "parent": parent,
            "session": session.hex(),
            "tokens": tokens(count, 33),
            "extra": extra,
        }

    yield private("example", 8)
    yield private("one token more", 9)
    yield private("another session", 8, session=b"session-2")
    yield private("with an extra digest", 8, "dd" * 32)
    yield private("a full chunk", 16)
    yield private("long", 3000)
    yield private("another parent", 8, parent="00" * 32)


def media():
    def some(name, each, starts):
        digests = [[token, bytes([byte] * 32).hex()] for byte, token in enumerate(starts, 1)]
        return {"name": name, "chunk_tokens": each, "media": digests}

    yield some("one", 16, [19])
    yield some("two in a chunk", 16, [16, 31])
    yield some("two in a chunk, elsewhere", 16, [16, 30])
    yield some("some in many chunks", 16, [0, 15, 16, 47, 48, 49, 50, 1000, 1007])
    yield some("one in each", 1, range(5))
    yield some("many in the largest chunk", 65536, range(3, 65536, 5000))


def blocks(namespace):
    def block(name, called, namespace=namespace):
        return {"name": name, "namespace": namespace, "block": called.hex()}

    yield block("example", bytes(range(32)))
    yield block("one byte", b"a")
    yield block("another namespace", bytes(range(32)), "00" * 32)
    yield block("long", bytes(i % 251 for i in range(300)))


def objects(namespace, layout, chunk):
    def one(title, first=0, layers=4, object_bytes=1 << 20, codec=0, sealed=0, secret=None):
        case = {"title": title, "namespace": namespace, "layout": layout, "chunk": chunk}
        case |= {"object_bytes": object_bytes, "first": first, "layers": layers, "codec": codec}
        return case | {"sealed": sealed, "secret": None if secret is None else secret.hex()}

    yield one("example")
    yield one("example with a secret", sealed=1, secret=bytes(range(32)))
    yield one("another run", first=2, layers=2, object_bytes=300_000)
    yield one("coded", codec=1)
    yield one("large", first=4095, layers=1, object_bytes=1 << 33)
    yield one("a short secret", secret=b"s")


def layouts():
    windowed = {"layers": [0, 1, 2], "dtype": "bf16", "rule": "window", "window": 1024}
    windowed |= {"kv_heads": 8, "k_bytes": 2048, "v_bytes": 2048}
    full = {"layers": [3], "dtype": "bf16", "rule": "full", "kv_heads": 8, "k_bytes": 2048, "v_bytes": 2048}
    latent = {"layers": list(range(61)), "dtype": "fp8_e4m3", "rule": "full", "kv_heads": 1, "k_bytes": 576}
    state = {"layers": [0, 2], "dtype": "f32", "rule": "state", "state_bytes": 65536}
    packed = {"layers": [1], "dtype": "int4", "rule": "full", "kv_heads": 4, "k_bytes": 256, "v_bytes": 256}
    for name, chunk_tokens, groups in [
        ("example", 16, [full, windowed]),
        ("example with longer chunks", 256, [windowed, full]),
        ("latent", 64, [latent]),
        ("states", 1, [packed, state]),
    ]:
        yield {"name": name, "layout": {"chunk_tokens": chunk_tokens, "groups": groups}}
    # The fingerprint is defined for arbitrary bytes.
    for count in [0, 1, 2000]:
        data = bytes(i % 251 for i in range(count))
        yield {"name": f"{count} bytes, no layout", "layout": None, "bytes": data.hex()}


def vectors():
    def done(kind, cases):
        return [case | RESULTS[kind](case) for case in cases]

    prints = done("layouts", layouts())
    names = done("identities", identities(bytes.fromhex(prints[0]["fingerprint"])))
    namespace = next(case["key"] for case in names if case["name"] == "example")
    links = done("chains", chains(namespace))
    return {
        "about": "docs/internals/keys.md; made by ffi-tests/oracles/keys.py. Bytes in hexadecimal. "
        "Token i is first + i * step, modulo 2^32.",
        "contexts": CONTEXTS,
        "layouts": prints,
        "identities": names,
        "chains": links,
        "private": done("private", privates(links[0]["keys"][-1])),
        "blocks": done("blocks", blocks(namespace)),
        "media": done("media", media()),
        "objects": done("objects", objects(namespace, prints[0]["fingerprint"], links[0]["keys"][0])),
    }


def check(found):
    """Computes all cases again and returns their number; exits at the first difference."""
    assert found["contexts"] == CONTEXTS, found["contexts"]
    count = 0
    for kind, results in RESULTS.items():
        assert found[kind], f"no {kind}"
        for case in found[kind]:
            wanted = results(case)
            if any(case[name] != value for name, value in wanted.items()):
                sys.exit(f"{kind}, {case.get('title') or case['name']}: differs\nwanted {wanted}")
            count += 1
    return count


def main():
    parser = argparse.ArgumentParser(description="keys of kvtier by the published definition")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE")
    what.add_argument("--check", metavar="FILE")
    args = parser.parse_args()
    print(check_blake3())
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            json.dump(vectors(), file, indent=1)
            file.write("\n")
    else:
        with open(args.check, encoding="utf-8") as file:
            print(f"{check(json.load(file))} keys agree")


if __name__ == "__main__":
    main()
