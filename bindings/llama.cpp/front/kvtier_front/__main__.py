"""Starts the proxy; see the package."""

import argparse
import os
import signal
import sys
import time

from .model import Model
from .proxy import Front
from .state_cache import IndexTooLarge, StateCache, lock_directory, open_policy
from .slots import Slots
from .upstream import Refused, Upstream


def size(text):
    """Bytes of a text such as 8G."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give one such as 500000000, 512M or 8G")
    return int(digits) * factor


def address(text):
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address: give one such as 127.0.0.1:8081")
    return host or "127.0.0.1", int(port)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="kvtier_front", description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8080", help="address of llama-server")
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8081), help="address of the proxy")
    parser.add_argument("--slots", required=True, help="directory of the server's --slot-save-path")
    parser.add_argument("--budget", type=size, default=8 << 30, help="bytes of saved states (default 8G)")
    parser.add_argument("--policy", default=None, help="eviction policy, such as s3fifo (default lru)")
    parser.add_argument("--identity", default="", help="text that distinguishes this model from others")
    parser.add_argument("--api-key-env", default="", help="environment variable with the server's API key")
    parser.add_argument("--start-s", type=float, default=600, help="seconds to wait for the server at start")
    parser.add_argument("--wait-s", type=float, default=600, help="seconds that a request waits for a slot")
    parser.add_argument("--server-s", type=float, default=600, help="seconds that the server may be silent")
    parser.add_argument("--call-s", type=float, default=60, help="seconds to save or restore a state")
    parser.add_argument("--idle-s", type=float, default=60, help="seconds that a client may be silent")
    parser.add_argument("--most-body-bytes", type=size, default=32 << 20, help="limit of a request's body")
    parser.add_argument("--most-connections", type=int, default=128, help="limit of simultaneous connections")
    return parser.parse_args(arguments)


def wait_for(slots, seconds):
    """Returns the server's state once it has loaded its model, which must be identifiable."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            server_state = slots.refresh()
            if server_state.identity is None:
                raise SystemExit("kvtier_front: the model's file cannot be accessed, so the model is not "
                                 "identified: start the server with an absolute path, or set --identity")
            return server_state
        except Refused as refused:
            if refused.status in (401, 403):
                text = f"kvtier_front: the server requires its API key: set --api-key-env ({refused})"
                raise SystemExit(text) from refused
            if time.monotonic() > deadline:
                raise SystemExit(f"kvtier_front: the server did not start within {seconds} s (--start-s): "
                                 f"{refused}") from refused
            time.sleep(0.2)


def main(arguments=None):
    options = parse(arguments)
    if not os.path.isdir(options.slots):
        raise SystemExit(f"kvtier_front: --slots {options.slots} is not a directory")
    try:
        # The lock is held until the process ends.
        lock_directory(options.slots)
    except OSError as error:
        raise SystemExit(f"kvtier_front: another proxy uses {options.slots}, or it cannot be locked: "
                         f"{error}") from error
    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise SystemExit(f"kvtier_front: the variable {options.api_key_env} of --api-key-env is empty: set it")
    upstream = Upstream(options.server, options.server_s, key, options.call_s)
    try:
        cache = StateCache(options.slots, options.budget, open_policy(options.policy))
    except (OSError, IndexTooLarge) as error:
        raise SystemExit(f"kvtier_front: {error}") from error
    slots = Slots(upstream, Model(upstream, options.identity), cache)
    wait_for(slots, options.start_s)
    front = Front(options.listen, options, upstream, slots, cache)
    host, port = front.server_address[:2]
    print(f"kvtier_front: http://{host}:{port} for {options.server}, {len(slots.all)} slots, "
          f"{len(cache.states)} states found, policy {cache.policy.name}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        front.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        cache.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
