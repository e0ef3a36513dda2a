"""Fetches the Python sources of a wheel without its libraries: vLLM's wheel has 500 MB, its sources
have 10 MB. `python sources.py vllm==0.33.0 FOLDER` extracts them there."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

#: Bytes that one request asks for at least, and the longest gap that it reads to save a request.
_BLOCK = 1 << 20
#: Seconds that the server may take for one request, and pip for its answer.
_TIMEOUT_S = 300


class Unavailable(Exception):
    """The wheel cannot be had here; the text says why."""


class _RemoteFile(io.RawIOBase):
    """A seekable file over HTTP range requests. The block that was read last is kept."""

    def __init__(self, url: str) -> None:
        self._url, self._at, self._first, self._block = url, 0, 0, b""
        with self._open("bytes=0-0") as answer:
            if answer.status != 206:
                raise Unavailable(f"the server of {url} does not answer range requests")
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _open(self, span: str) -> Any:
        request = urllib.request.Request(self._url, headers={"Range": span})
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._at + size)
        if not self._first <= self._at <= end <= self._first + len(self._block):
            last = min(self._size, max(end, self._at + _BLOCK)) - 1
            if last < self._at:
                return b""
            with self._open(f"bytes={self._at}-{last}") as answer:
                self._first, self._block = self._at, answer.read()
        data = self._block[self._at - self._first: end - self._first]
        self._at = end
        return data


def wheel_url(requirement: str) -> str:
    """The address of the wheel that pip would install. pip reads its metadata only."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed",
         "--no-deps", "--only-binary", ":all:", "--report", "-", requirement],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"pip finds no wheel of {requirement}: {reason}")
    report: Dict[str, List[Dict[str, Any]]] = json.loads(done.stdout)
    return str(report["install"][0]["download_info"]["url"])


def _wanted(name: str) -> bool:
    # SGLang looks for its CUDA headers when it is imported.
    return name.endswith((".py", ".h", ".cuh", ".dist-info/METADATA"))


def extract(requirement: str, folder: Path) -> Path:
    """Extracts the sources of `requirement` (`name==version`) to a subfolder, once. Returns it."""
    target = folder / requirement
    done = target / ".complete"
    if done.exists():
        return target
    try:
        url = wheel_url(requirement)
        with zipfile.ZipFile(_RemoteFile(url)) as wheel:
            members = [one for one in wheel.infolist() if _wanted(one.filename)]
            # In the file's order, so that one request serves many members.
            for member in sorted(members, key=lambda one: one.header_offset):
                wheel.extract(member, target)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        raise Unavailable(f"{requirement} cannot be fetched: {error}") from error
    done.touch()
    return target


if __name__ == "__main__":
    print(extract(sys.argv[1], Path(sys.argv[2])))
