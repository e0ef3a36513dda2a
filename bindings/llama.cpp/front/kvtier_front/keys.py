"""What a prompt starts with, as a chain of hashes: prompts are compared and kept without their text."""

import hashlib
import json

# Characters of a block. Tokens are the server's business: it reuses exactly what its own are equal in.
BLOCK = 64
DIGEST_BYTES = 12


def lora_of(request):
    """The adapters of a request, as text; empty where it has none of its own."""
    lora = request.get("lora")
    return json.dumps(lora, sort_keys=True) if lora else ""


def chain(identity, text, lora=""):
    """A digest for each whole block of the text; equal digests mean equal text from the start on, and the
    same model and adapters. None at all of a model that is not known."""
    if identity is None:
        return []
    digests, last = [], f"{identity}\0{lora}".encode()
    for at in range(0, len(text) - len(text) % BLOCK, BLOCK):
        block = text[at:at + BLOCK].encode("utf-8", "surrogatepass")
        last = hashlib.blake2b(last + b"\0" + block, digest_size=DIGEST_BYTES).digest()
        digests.append(last.hex())
    return digests


def common(one, other):
    """Blocks that two chains have in common: the first that differs makes all after it differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def text_of(prompt):
    """A prompt as text: a string, or tokens and such as JSON, each with a mark behind."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        return "".join(f"{one}," for one in prompt)
    return json.dumps(prompt, sort_keys=True)
