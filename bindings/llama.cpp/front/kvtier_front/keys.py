"""Keys of prompts: a chain of hashes, so that prompts are compared and stored without their text."""

import hashlib
import json

# Characters of a block. Tokens do not matter here: the server reuses exactly the tokens that are equal.
BLOCK = 64
DIGEST_BYTES = 12


def lora_of(request):
    """The adapters of a request, as text; empty if it names none."""
    lora = request.get("lora")
    return json.dumps(lora, sort_keys=True) if lora else ""


def chain(identity, text, lora=""):
    """A digest for each whole block of the text. Equal digests mean equal text from the start on, and the
    same model and adapters. Empty for an unknown model."""
    if identity is None:
        return []
    digests, last = [], f"{identity}\0{lora}".encode()
    for at in range(0, len(text) - len(text) % BLOCK, BLOCK):
        block = text[at:at + BLOCK].encode("utf-8", "surrogatepass")
        last = hashlib.blake2b(last + b"\0" + block, digest_size=DIGEST_BYTES).digest()
        digests.append(last.hex())
    return digests


def common(one, other):
    """Number of equal blocks of two chains. After the first difference all digests differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def text_of(prompt):
    """A prompt as text: a string as it is, tokens with a comma after each, other values as JSON."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        return "".join(f"{one}," for one in prompt)
    return json.dumps(prompt, sort_keys=True)
