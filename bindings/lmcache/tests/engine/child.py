"""Another process with the plugin: `child.py ACTION PATH [FIRST COUNT]`."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent.parent, HERE.parent.parent.parent / "vllm"):
    sys.path.insert(0, str(folder))

from sites import Site  # noqa: E402


def main() -> None:
    """`put` prints the chunks' hashes; `die` puts one at a time until it is killed."""
    action, path, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    site = Site(path, level="durable" if action == "die" else "disk")
    numbers = range(first, first + count)
    if action == "open":
        print("opened" if site.backend else "none")
    elif action == "put":
        for data in site.put(numbers):
            print(hashlib.sha256(data).hexdigest())
    else:
        for number in numbers:
            [data] = site.put([number])
            print(hashlib.sha256(data).hexdigest(), flush=True)
    sys.stdout.flush()
    site.close()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)  # the storage manager's thread would keep the process alive
