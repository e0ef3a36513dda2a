#!/usr/bin/env bash
# kvtier beside other systems that install from the Python package index, on this disk.
#
#   run.sh WORKDIR [--quick]
#
# Builds the library, makes a virtual environment in WORKDIR (0.5 GiB), measures, and
# removes both again; KVTIER_PEERS_KEEP=1 keeps them. mooncake needs the Debian package
# libibverbs1. Not part of the test run: it takes minutes and downloads much.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mkdir -p "${1:?a directory to work in}" && cd "$1" && pwd)
shift
target=${CARGO_TARGET_DIR:-$root/target}

cleanup() {
    [ -n "${KVTIER_PEERS_KEEP:-}" ] || rm -rf "$work/venv" "$work/data"
}
trap cleanup EXIT

(cd "$root" && CARGO_TARGET_DIR=$target cargo rustc --release --lib --crate-type cdylib --no-default-features --features redis,dir)
[ -x "$work/venv/bin/python" ] || python3 -m venv "$work/venv"
pip() { "$work/venv/bin/pip" install -q "$@"; }
pip numpy==2.4.6
# One that cannot be had has no value and says so; the others go on.
pip mooncake-transfer-engine-non-cuda==0.3.13.post1 || true
pip --no-deps nixl-cu12==1.5.1 || true

# The peers write to standard output as well: only our lines are passed on.
python3 "$root/bindings/python/generate.py"
KVTIER_LIBRARY=$target/release/libkvtier.so PYTHONPATH=$root/bindings/python \
    "$work/venv/bin/python" "$here/peers.py" "$work/data" "$@" | grep '^{"group"'
