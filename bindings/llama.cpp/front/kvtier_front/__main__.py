"""Starts the front; see the package."""

import argparse
import os
import signal
import sys
import time

from .model import Model
from .proxy import Front
from .shelf import IndexTooLarge, Shelf, hold, open_policy
from .slots import Slots
from .upstream import Refused, Upstream


def size(text):
    """Bytes of a text such as 8G."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500000000, 512M or 8G")
    return int(digits) * factor


def address(text):
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
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
    parser.add_argument("--call-s", type=float, default=60, help="how long it may save or fetch a state")
    parser.add_argument("--idle-s", type=float, default=60, help="how long a client may be silent")
    parser.add_argument("--most-body-bytes", type=size, default=32 << 20)
    parser.add_argument("--most-connections", type=int, default=128)
    return parser.parse_args(words)


def wait_for(slots, seconds):
    """The server as it is once it has loaded its model. Its model must be known."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            seen = slots.look()
            if seen.identity is None:
                raise SystemExit("kvtier_front: the model's file cannot be seen from here, and models must "
                                 "be told apart: start the server with an absolute path, or say which "
                                 "model it is with --identity")
            return seen
        except Refused as refused:
            if refused.status in (401, 403):
                words = f"kvtier_front: the server wants its key (--api-key-env): {refused}"
                raise SystemExit(words) from refused
            if time.monotonic() > deadline:
                raise SystemExit(f"kvtier_front: no server: {refused}") from refused
            time.sleep(0.2)


def main(words=None):
    options = parse(words)
    if not os.path.isdir(options.slots):
        raise SystemExit(f"kvtier_front: {options.slots} is not a directory")
    try:
        # Held until the process ends.
        hold(options.slots)
    except OSError as error:
        raise SystemExit(f"kvtier_front: {options.slots} is another front's: {error}") from error
    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise SystemExit(f"kvtier_front: the variable {options.api_key_env} is empty")
    upstream = Upstream(options.server, options.server_s, key, options.call_s)
    try:
        shelf = Shelf(options.slots, options.budget, open_policy(options.policy))
    except (OSError, IndexTooLarge) as error:
        raise SystemExit(f"kvtier_front: {error}") from error
    slots = Slots(upstream, Model(upstream, options.identity), shelf)
    wait_for(slots, options.start_s)
    front = Front(options.listen, options, upstream, slots, shelf)
    host, port = front.server_address[:2]
    print(f"kvtier_front: http://{host}:{port} before {options.server}, {len(slots.all)} slots, "
          f"{len(shelf.states)} states found again, policy {shelf.policy.name}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        front.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        shelf.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
