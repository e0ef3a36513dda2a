"""Checks the installed version of transformers."""

from __future__ import annotations

import warnings

import transformers

from ._errors import unsupported

#: Supported versions: from the first, before the second.
KNOWN = ((5, 23), (6, 0))
#: Minor version of the tests. Caches change between minor versions, so others give a warning.
TESTED = (5, 23)


def check(version: str) -> None:
    """Raises for an unsupported version, and warns of an untested one."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not KNOWN[0] <= numbers < KNOWN[1]:
        raise unsupported(f"transformers {version} is not supported: this package needs 5.23 or "
                          'newer, before 6. Run pip install "transformers>=5.23,<6"')
    if numbers != TESTED:
        warnings.warn(f"transformers {version} is untested: kvtier_transformers was tested with "
                      "5.23 only", stacklevel=2)


check(transformers.__version__)
