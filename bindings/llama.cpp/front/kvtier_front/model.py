"""Identifies the server's model, and detects a restart of its process."""

import hashlib
import json
import os
import re
from typing import NamedTuple, Optional

from .upstream import Refused


RANDOM_MARKER = re.compile(r"<__media_[0-9A-Za-z]{32}__>")


class ServerState(NamedTuple):
    """The server's state at one moment. Without identity no state may be saved or restored."""

    identity: Optional[str]
    process: str
    slots: int


def file_of(path):
    """Size and modification time of a file; None if it cannot be accessed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError, TypeError):
        return None
    return [status.st_size, status.st_mtime_ns]


def identity_of(props, adapters, file, given_identity):
    """The identity of states. A state does not name its model, and the server does not check it. Therefore
    every key includes the model's file with size and time, the build, the template, the adapters, and the
    number of slots: the engine refuses states of caches that were divided otherwise. None if neither the
    file nor the user identifies the model."""
    if file is None and not given_identity:
        return None
    parts = [props.get(name) for name in ("model_path", "build_info", "chat_template", "total_slots")]
    parts += [file, adapters, given_identity]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class Model:
    """For any thread. The answer holds for the moment of the call."""

    def __init__(self, upstream, given_identity=""):
        self.upstream, self.given_identity = upstream, given_identity
        # The last process: its marker, its file as it was at its start, and its adapters.
        self.last = None

    def query(self):
        props = self.upstream.call("GET", "/props")
        if not isinstance(props, dict):
            raise Refused(502, "the server's answer to /props is not a JSON object")
        count = props.get("total_slots")
        count = max(1, count) if isinstance(count, int) else 1
        # Random in each process. Older servers have none, and LLAMA_MEDIA_MARKER makes it the same for all.
        marker = props.get("media_marker")
        process = marker if isinstance(marker, str) and RANDOM_MARKER.fullmatch(marker) else ""
        file, last = file_of(props.get("model_path")), self.last
        if not process or last is None or last[0] != process:
            last = self.last = (process, file, self._adapters())
        # A file that was replaced while the server runs differs from the model in its memory.
        is_same = file == last[1]
        identity = identity_of(props, last[2], file, self.given_identity) if is_same else None
        return ServerState(identity, process, count)

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
