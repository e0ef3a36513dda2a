"""Starts the front; see the package."""

import argparse
import hashlib
import json
import os
import sys
import time

from .proxy import Front
from .shelf import Shelf, hold, open_policy
from .slots import Slots
from .upstream import Refused, Upstream


def size(text):
    """Bytes of a text such as 8G."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500000000, 512M or 8G")
    return int(digits) * factor


def address(text):
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as 127.0.0.1:8081")
    return host or "127.0.0.1", int(port)


def parse(words):
    parser = argparse.ArgumentParser(prog="kvtier_front", description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8080", help="llama-server")
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8081))
    parser.add_argument("--slots", required=True, help="the directory of its --slot-save-path")
    parser.add_argument("--budget", type=size, default=8 << 30, help="bytes of saved states")
    parser.add_argument("--policy", default=None, help="who leaves: a policy of kvtier's, such as s3fifo")
    parser.add_argument("--identity", default="", help="what else tells this model from others")
    parser.add_argument("--api-key-env", default="", help="the variable that has the server's key")
    parser.add_argument("--start-s", type=float, default=600, help="how long to wait for the server")
    parser.add_argument("--wait-s", type=float, default=600, help="how long a request waits for a slot")
    parser.add_argument("--server-s", type=float, default=600, help="how long the server may be silent")
    parser.add_argument("--idle-s", type=float, default=60, help="how long a client may be silent")
    parser.add_argument("--most-body-bytes", type=size, default=32 << 20)
    parser.add_argument("--most-connections", type=int, default=128)
    return parser.parse_args(words)


def wait_for(upstream, seconds):
    """The server's properties, once it has loaded its model."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return upstream.call("GET", "/props")
        except Refused as refused:
            if time.monotonic() > deadline:
                raise SystemExit(f"kvtier_front: no server: {refused}") from refused
            time.sleep(0.2)


def identity_of(props, said):
    """Whose states these are. A state does not say of which model it is, and the server does not ask: so the
    model's file, its length and time, the build and the template are part of every key."""
    path = props.get("model_path") or ""
    try:
        seen = os.stat(path)
        file = [seen.st_size, seen.st_mtime_ns]
    except OSError:
        file = []
    parts = [path, file, props.get("build_info"), props.get("chat_template"), said]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def main(words=None):
    options = parse(words)
    if not os.path.isdir(options.slots):
        raise SystemExit(f"kvtier_front: {options.slots} is not a directory")
    try:
        # Held until the process ends.
        hold(options.slots)
    except OSError as error:
        raise SystemExit(f"kvtier_front: {options.slots} is another front's: {error}") from error
    upstream = Upstream(options.server, options.server_s, os.environ.get(options.api_key_env) or None)
    props = wait_for(upstream, options.start_s)
    identity = identity_of(props, options.identity)
    shelf = Shelf(options.slots, options.budget, identity, open_policy(options.policy))
    slots = Slots(upstream, shelf, max(1, int(props.get("total_slots") or 1)))
    front = Front(options.listen, options, upstream, slots, shelf)
    host, port = front.server_address[:2]
    print(f"kvtier_front: http://{host}:{port} before {options.server}, {len(slots.all)} slots, "
          f"{len(shelf.states)} states found again, policy {shelf.policy.name}", flush=True)
    try:
        front.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
