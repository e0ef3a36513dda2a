"""The versions of transformers that this package knows."""

from __future__ import annotations

import transformers

from ._errors import unsupported

#: From and before: caches change between minor versions, so others are refused.
KNOWN = ((5, 23), (6, 0))


def check(version: str) -> None:
    """Fails for a version whose caches this package was not made for."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not KNOWN[0] <= numbers < KNOWN[1]:
        raise unsupported(f"transformers {version}: this needs 5.23 or newer, before 6: "
                          'pip install "transformers>=5.23,<6"')


check(transformers.__version__)
