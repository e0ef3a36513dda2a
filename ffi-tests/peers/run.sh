#!/usr/bin/env bash
# kvtier beside other systems, on this machine and this disk.
#
#   run.sh WORKDIR [--quick] [--only NAME,...] [--gigabytes] [--save TEXT]
#
# NAME is lmcache, mooncake, nixl, redis, libcachesim, caches (moka, quick_cache, foyer, schnellru,
# lru), torch, ggml or runai; default: all. --gigabytes allows torch, which LMCache needs, with its
# CUDA packages (6 GiB); KVTIER_TORCH_INDEX names a package index with a smaller torch.
#
# Prints JSON, one object a line, and keeps it in WORKDIR/peers.jsonl (record.py says what is in
# it). What is absent is skipped with the reason. --save also writes the results, with TEXT about
# the run, and draws the tables of the documentation. What was installed in WORKDIR is removed at the
# end; KVTIER_PEERS_KEEP=1 keeps it. KVTIER_PEERS_WRAP is a command before each measurement.
# mooncake needs the Debian package libibverbs1, redis needs redis-server and redis-tools; ggml needs
# cmake, ninja and a C++ compiler.
# Not part of the test run: it takes half an hour and downloads much.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mkdir -p "${1:?a directory to work in}" && cd "$1" && pwd)
shift
only=lmcache,mooncake,nixl,redis,libcachesim,caches,torch,ggml,runai
quick=() gigabytes= save=
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=(--quick) ;;
    --only) only=${2:?names}; shift ;;
    --gigabytes) gigabytes=1 ;;
    --save) save=${2:?a text about the run}; shift ;;
    *) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
    shift
done
target=${CARGO_TARGET_DIR:-$root/target}
python=$work/venv/bin/python
read -ra wrap <<<"${KVTIER_PEERS_WRAP:-}"

cleanup() {
    rm -rf "$work/data"
    [ -n "${KVTIER_PEERS_KEEP:-}" ] || rm -rf "$work/venv" "$work/llama"
}
trap cleanup EXIT

wants() {
    local name
    for name in "$@"; do [[ ,$only, == *,$name,* ]] && return 0; done
    return 1
}

skip() { # GROUP SIDE REASON
    echo "SKIP $2: $3" >&2
    printf '{"group": "%s", "name": "all", "side": "%s", "value": null, "unit": "", "ratio": null, "versions": {}, "skip": "%s"}\n' "$@"
}

pip() { "$work/venv/bin/pip" install -q --disable-pip-version-check "$@" >&2; }

# The version of a package as JSON.
versions() { "$python" -c 'import json, sys; sys.path.insert(0, sys.argv[1]); from sides import version; print(json.dumps(version(*sys.argv[2:])))' "$here" "$@"; }

# Measures; systems write to standard output as well, so only lines of JSON pass.
measure() { "${wrap[@]}" "$@" | grep '^{' || echo "failed: $*" >&2; }

library() {
    [ -n "${KVTIER_LIBRARY:-}" ] || (cd "$root" && CARGO_TARGET_DIR=$target cargo rustc -q --release --lib \
        --crate-type cdylib --no-default-features --features redis,dir)
    export KVTIER_LIBRARY=${KVTIER_LIBRARY:-$target/release/libkvtier.so} PYTHONPATH=$root/bindings/python
    python3 "$root/bindings/python/generate.py"
    [ -x "$python" ] || python3 -m venv "$work/venv"
    "$python" -c 'import numpy' 2>/dev/null || pip numpy==2.2.6
}

torch() {
    "$python" -c 'import torch' 2>/dev/null && return 0
    if [ -n "${KVTIER_TORCH_INDEX:-}" ]; then
        pip --index-url "$KVTIER_TORCH_INDEX" torch
    elif [ -n "$gigabytes" ]; then
        pip torch
    else
        return 1
    fi
}
no_torch="needs torch, 6 GiB: add --gigabytes, or name an index with a smaller one in KVTIER_TORCH_INDEX"

lmcache() {
    "$python" -c 'import lmcache' 2>/dev/null && return 0
    torch && pip --no-deps lmcache==0.5.6 &&
        pip msgspec sortedcontainers psutil pyyaml prometheus_client opentelemetry-sdk \
            opentelemetry-exporter-otlp opentelemetry-exporter-prometheus aiofiles aiofile redis pyzmq \
            safetensors nvtx cachetools blake3 py-cpuinfo aiohttp httpx fastapi cryptography numba \
            transformers 'numpy<=2.2.6' &&
        { pip --no-deps --pre lmcache-rust-raw-block-io || true; }
}

# Host memory and disk: all sides in one process.
tiers() {
    local sides=()
    if wants mooncake; then
        pip mooncake-transfer-engine-non-cuda==0.3.13.post1 || true
        sides+=(mooncake)
    fi
    if wants nixl; then
        pip --no-deps nixl-cu12==1.5.1 || true
        sides+=(nixl)
    fi
    if wants lmcache; then
        if lmcache; then sides+=(lmcache); else skip host LMCache "$no_torch"; fi
    fi
    local names kib
    names=$(IFS=,; echo "${sides[*]:-none}")
    for kib in 64 256 1024; do
        measure "$python" "$here/host.py" "$work/data" "${quick[@]}" --sides "$names" --sizes "$kib"
    done
    measure "$python" "$here/disk.py" "$work/data" "${quick[@]}" --sides "$names"
}

bench() {
    [ -n "${KVTIER_BENCH:-}" ] || (cd "$root" && CARGO_TARGET_DIR=$target cargo build -q --release -p kvtier-bench --features peers)
    export KVTIER_BENCH=${KVTIER_BENCH:-$target/release/kvtier-bench}
}

redis() {
    if ! command -v redis-benchmark >/dev/null; then
        skip remote redis-benchmark "install redis-server and redis-tools"
        return
    fi
    bench
    KVTIER_BENCH_DIR=$work measure "$KVTIER_BENCH" remote "${quick[@]}" --json |
        python3 "$here/record.py" convert "{\"redis\": \"$(redis-server --version | sed 's/.*v=\([^ ]*\).*/\1/')\"}"
    if wants lmcache; then
        if lmcache; then
            measure "$python" "$here/remote.py" "${quick[@]}" | python3 "$here/record.py" convert "$(versions lmcache torch)"
        else
            skip remote_peers LMCache "$no_torch"
        fi
    fi
}

libcachesim() {
    if ! pip libcachesim zstandard; then
        skip libcachesim libCacheSim "the package libcachesim cannot be had"
        return
    fi
    bench
    local program
    for program in cache throughput; do
        measure "$python" "$root/ffi-tests/oracles/$program.py" "$KVTIER_BENCH" "${quick[@]}" |
            sed 's/"group": "[a-z]*"/"group": "libcachesim"/' |
            python3 "$here/record.py" convert "$(versions libcachesim)"
    done
}

caches() {
    bench
    measure "$KVTIER_BENCH" cache "${quick[@]}" --json | python3 "$here/record.py" convert "$(
        cd "$root" && cargo tree -q -p kvtier-bench --features peers --depth 1 --prefix none | python3 -c '
import json, sys
rows = [line.split() for line in sys.stdin]
print(json.dumps({row[0]: row[1][1:] for row in rows
                  if row and row[0] in ("foyer-memory", "lru", "moka", "quick_cache", "schnellru")}))')"
}

# A program of this folder, which may be absent, and the packages that it compares with.
program() { # FILE SIDE PACKAGE...
    local file=$1 side=$2
    shift 2
    if [ ! -f "$here/$file" ]; then
        skip "${file%.py}" "$side" "$file is not in this version"
    elif ! pip --no-deps "$@"; then
        skip "${file%.py}" "$side" "$* cannot be had"
    else
        measure "$python" "$here/$file" "$work/data" "${quick[@]}" | python3 "$here/record.py" convert "$(versions "$@")"
    fi
}

# Attention kernels on the processor: all sides in one process.
attention() {
    local sides=()
    if wants torch; then
        if torch; then sides+=(--torch); else skip attention torch "$no_torch"; fi
    fi
    if wants ggml; then
        if KVTIER_ENGINE_NATIVE=ON "$root/bindings/llama.cpp/engine.sh" "$work/llama" >&2; then
            sides+=(--ggml "$work/llama/engine/lib")
        else
            skip attention ggml "its build failed"
        fi
    fi
    # torch compiles some kernels at the first use.
    TORCHINDUCTOR_CACHE_DIR=$work/data/inductor measure "$python" "$here/attention.py" "${sides[@]}" "${quick[@]}"
}

{
    python3 "$here/record.py" head
    library
    if wants lmcache mooncake nixl; then tiers; fi
    if wants redis; then redis; fi
    if wants caches moka quick_cache foyer schnellru lru; then caches; fi
    if wants libcachesim; then libcachesim; fi
    if wants torch ggml; then attention; fi
    if wants runai; then program load.py "Run:ai Model Streamer" runai-model-streamer safetensors; fi
} | tee "$work/peers.jsonl"
[ -z "$save" ] || python3 "$here/record.py" save "$work/peers.jsonl" --about "$save"
