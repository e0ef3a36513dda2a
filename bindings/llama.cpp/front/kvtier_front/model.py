"""Which model the server has, and whether it is still the same process."""

import hashlib
import json
import os
import re
from typing import NamedTuple, Optional

from .upstream import Refused


RANDOM_MARKER = re.compile(r"<__media_[0-9A-Za-z]{32}__>")


class Seen(NamedTuple):
    """What a look at the server has shown. No identity: no state may be kept or used."""

    identity: Optional[str]
    process: str
    slots: int


def file_of(path):
    """What tells a file from another of its name."""
    try:
        seen = os.stat(path)
    except (OSError, ValueError, TypeError):
        return None
    return [seen.st_size, seen.st_mtime_ns]


def identity_of(props, adapters, file, said):
    """Whose states these are. A state does not say of which model it is, and the server does not ask: so the
    model's file, its length and time, the build, the template and adapters are part of every key, and the
    number of slots, as the engine refuses states of caches that were parted otherwise. None where neither the
    file nor its owner says which model it is."""
    if file is None and not said:
        return None
    parts = [props.get(name) for name in ("model_path", "build_info", "chat_template", "total_slots")]
    parts += [file, adapters, said]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class Model:
    """Any thread. Its answer is about the moment of the call."""

    def __init__(self, upstream, said=""):
        self.upstream, self.said = upstream, said
        # Of the process that was seen last: its file as it was then, and its adapters.
        self.last = None

    def look(self):
        props = self.upstream.call("GET", "/props")
        if not isinstance(props, dict):
            raise Refused(502, "the server's properties are no object")
        count = props.get("total_slots")
        count = max(1, count) if isinstance(count, int) else 1
        # Random in each process; older servers have none, and LLAMA_MEDIA_MARKER makes it the same for all.
        marker = props.get("media_marker")
        process = marker if isinstance(marker, str) and RANDOM_MARKER.fullmatch(marker) else ""
        file, last = file_of(props.get("model_path")), self.last
        if not process or last is None or last[0] != process:
            last = self.last = (process, file, self._adapters())
        # A file that was replaced under a running server is not what that has in memory.
        is_same = file == last[1]
        identity = identity_of(props, last[2], file, self.said) if is_same else None
        return Seen(identity, process, count)

    def _adapters(self):
        try:
            adapters = self.upstream.call("GET", "/lora-adapters")
        except Refused as refused:
            if refused.is_gone or refused.status not in (404, 501):
                raise
            return []
        if not isinstance(adapters, list):
            return [adapters]
        return [[one, file_of(one.get("path"))] if isinstance(one, dict) else one for one in adapters]
