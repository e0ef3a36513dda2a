"""The versions of transformers that this package knows."""

from __future__ import annotations

import warnings

import transformers

from ._errors import unsupported

#: From and before: others are refused.
KNOWN = ((5, 23), (6, 0))
#: Caches change between minor versions, too: others than this are taken with a warning.
TESTED = (5, 23)


def check(version: str) -> None:
    """Fails for a version whose caches this package was not made for; warns of one that it was
    not tested with."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not KNOWN[0] <= numbers < KNOWN[1]:
        raise unsupported(f"transformers {version}: this needs 5.23 or newer, before 6: "
                          'pip install "transformers>=5.23,<6"')
    if numbers != TESTED:
        warnings.warn(f"transformers {version}: kvtier_transformers was tested with 5.23 alone",
                      stacklevel=2)


check(transformers.__version__)
