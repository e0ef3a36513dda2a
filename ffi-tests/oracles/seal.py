#!/usr/bin/env python3
"""Sealed objects by the definition of docs/internals/formats.md: the oracle of src/tier/remote/seal_tests.rs.

    seal.py --write FILE    writes the vectors
    seal.py --check FILE    seals all objects of FILE again, and compares

Shares no code with the library: BLAKE3 comes from keys.py, AES-GCM from the package cryptography.
A line of the file is a name and a value. For frames the file has the tags, which depend on every
byte before them, and the last bytes.
"""

import argparse
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from keys import derive_key  # noqa: E402

from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: E402

CONTEXT = "kvtier 2026-11-23 v1 object seal"
FRAME = 256 << 10


def content(size):
    return bytes((at * 7 + (at >> 8) * 13 + 5) & 255 for at in range(size))


def sealed(secret, random, tenant, name, plain):
    envelope = b"KVTO" + struct.pack("<HH", 1, 1) + random + struct.pack("<Q", len(plain)) + bytes(32)
    who = struct.pack("<Q", tenant) + name
    key = derive_key(CONTEXT, struct.pack("<Q", len(secret)) + secret + random + who)
    frames = [plain[at : at + FRAME] for at in range(0, len(plain), FRAME)] or [b""]
    out = envelope
    for number, frame in enumerate(frames):
        nonce = struct.pack("<QB", number, number == len(frames) - 1) + bytes(3)
        out += AESGCM(key).encrypt(nonce, frame, envelope + who)
    return out


def lines():
    sizes = [0, 1, 15, 4096, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 600_000]
    for case, size in enumerate(sizes):
        secret = bytes((case * 3 + at) & 255 for at in range(32 + case))
        random = bytes((case * 5 + at * 11) & 255 for at in range(16))
        tenant, name = case * 1_000_003, bytes((case + at * 17) & 255 for at in range(20))
        out = sealed(secret, random, tenant, name, content(size))
        at, tags = 64, []
        while at < len(out):
            at = min(at + FRAME + 16, len(out))
            tags.append(out[at - 16 : at].hex())
        yield f"bytes {size}"
        yield f"secret {secret.hex()}"
        yield f"random {random.hex()}"
        yield f"tenant {tenant}"
        yield f"name {name.hex()}"
        yield f"envelope {out[:64].hex()}"
        yield f"tags {','.join(tags)}"
        yield f"end {out[-48:].hex()}"


def main():
    parser = argparse.ArgumentParser(description="sealed objects by the published definition")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE")
    what.add_argument("--check", metavar="FILE")
    args = parser.parse_args()
    text = "\n".join(lines()) + "\n"
    if args.write:
        pathlib.Path(args.write).write_text(text, encoding="utf-8")
    elif pathlib.Path(args.check).read_text(encoding="utf-8") != text:
        sys.exit(f"the sealed objects differ from {args.check}")
    else:
        print(f"{text.count('tags ')} sealed objects agree")


if __name__ == "__main__":
    main()
