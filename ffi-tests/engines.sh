#!/bin/bash
# The connectors against real engines, on the processor:
#
#   ffi-tests/engines.sh PREBUILT WORK [--bench] [ENGINE...]
#
# ENGINE is lmdeploy, vllm, sglang, transformers or mooncake; all of them by default. PREBUILT has
# lib/libkvtier.so (see cmake/build.sh). A virtual environment with torch, transformers and the
# engines' wheels (without what they depend on: only their interfaces are run) goes to WORK, 8 GB
# of it; KVTIER_ENGINES_PYTHON names an interpreter that has them already. With --bench the bench
# scripts run, too (Mooncake's has lmdeploy's bars): a line a bar, of some JSON, of others text. What
# cannot be run says SKIP and why.
set -uo pipefail
prebuilt=${1:?usage: engines.sh PREBUILT WORK [--bench] [ENGINE...]}
work=${2:?usage: engines.sh PREBUILT WORK [--bench] [ENGINE...]}
shift 2
bench=""
if [ "${1:-}" = --bench ]; then bench=1 && shift; fi
known="lmdeploy vllm sglang transformers mooncake"
engines=${*:-$known}
for engine in $engines; do
    case " $known " in *" $engine "*) ;; *) echo "no engine '$engine': $known" && exit 2 ;; esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd) || exit 1
mkdir -p "$work" && work=$(cd "$work" && pwd) || exit 1
unset KVTIER_LIBRARY PYTHONPATH
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# No engine asks anybody for anything.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# The versions that the connectors are written for.
declare -A wheels=([lmdeploy]="lmdeploy==0.18.0" [vllm]="vllm==0.33.0 lmcache==0.5.6"
    [sglang]="sglang==0.5.23" [transformers]=""
    [mooncake]="lmdeploy==0.18.0 vllm==0.33.0 sglang==0.5.23")
base="torch==2.15.0 transformers==5.23.0 numpy pytest mypy"
# What imports of the engines' interfaces need, and checks of ours.
small="msgspec pydantic psutil xxhash safetensors ml_dtypes auditwheel pyright"
# What SGLang's storage and controller import on their way.
small="$small aiohttp apache-tvm-ffi compressed-tensors dill gguf ipython loguru orjson pillow \
pybase64 pyzmq requests sentencepiece setproctitle starlette torchvision uvloop"
# What LMCache's disk imports, which vLLM's tier is compared with.
small="$small aiofile cachetools cryptography numba prometheus_client py-cpuinfo sortedcontainers"
# SGLang compiles its hash of pages when it is first asked for one: with ninja, and OpenSSL's headers.
small="$small ninja"

environment() {
    local free_mib engine
    free_mib=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') / 1024))
    if [ ! -x "$work/venv/bin/python" ] && [ "$free_mib" -lt 12288 ]; then
        echo "SKIP: torch and the engines need 12 GiB of disk under $work; free are $free_mib MiB"
        return 77
    fi
    [ -x "$work/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$work/venv" || return 1
    # shellcheck disable=SC2086
    if ! "$work/venv/bin/pip" install -q $base $small; then
        echo "SKIP: torch, transformers and small packages cannot be had"
        return 77
    fi
    for engine in $engines; do
        [ -n "${wheels[$engine]}" ] || continue
        # shellcheck disable=SC2086
        "$work/venv/bin/pip" install -q --no-deps ${wheels[$engine]} ||
            echo "SKIP: ${wheels[$engine]} cannot be had: tests that need it skip"
    done
}

headers() {
    case " $engines " in *" sglang "*) ;; *) return ;; esac
    echo '#include <openssl/sha.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null && return
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        { apt-get update && apt-get install -y --no-install-recommends g++ libssl-dev; } \
            >"$work/apt.log" 2>&1 && return
    fi
    echo "SKIP: no compiler with OpenSSL's headers (libssl-dev): SGLang's own threads cannot run"
    export KVTIER_NO_SGLANG_HASH=1
}

headers
python=${KVTIER_ENGINES_PYTHON:-}
if [ -z "$python" ]; then
    environment || exit
    python=$work/venv/bin/python
fi

# The wheel, in a folder of its own: an interpreter that was lent stays as it is.
rm -rf "$work/dist" "$work/kvtier"
"$python" "$root/bindings/python/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist" &&
    "$python" -m pip install -q --no-index --no-deps --target "$work/kvtier" \
        "$work"/dist/kvtier-*.whl || exit 1
export PYTHONPATH=$work/kvtier
# Programs of the environment, and a place of our own for what engines compile.
PATH=$(dirname "$python"):$PATH
export PATH TORCH_EXTENSIONS_DIR=$work/extensions

cd "$work" || exit 1
failed=0
check() {
    local status=0 log=$work/log
    "$python" -m pytest -ra -p no:cacheprovider -c "$root/bindings/python/pyproject.toml" "$@" |
        tee "$log"
    status=${PIPESTATUS[0]}
    # 5: there was nothing to run. Tests that all skip, each by itself, are as much.
    if [ "$status" -eq 5 ] || { [ "$status" -eq 0 ] && ! tail -n 1 "$log" | grep -q ' passed'; }
    then
        echo "SKIP: nothing of ${*: -1} can run here"
        return
    fi
    [ "$status" -eq 0 ] || failed=1
}

echo "--- the package: what needs torch, or auditwheel"
tests=$root/bindings/python/tests
check --rootdir "$root/bindings/python" "$tests/test_tensors.py" "$tests/test_buffer.py" \
    "$tests/test_process.py"
if "$python" -m pyright --version >/dev/null 2>&1; then
    (cd "$root/bindings/python" && "$python" -m pyright --pythonpath "$python" \
        kvtier bench.py build_wheel.py generate.py) || failed=1
else
    echo "SKIP: pyright cannot run (it needs node, and fetches itself once)"
fi
echo "--- what is run on a GPU, on tensors of the processor"
"$python" "$root/ffi-tests/gpu/python_paths.py" --device cpu --quick || failed=1
# Tests of connectors may look at the source tree, which has no library in it.
export KVTIER_LIBRARY=$prebuilt/lib/libkvtier.so
for engine in $engines; do
    home=$root/bindings/$engine
    if ! compgen -G "$home/tests/test_*.py" >/dev/null; then
        echo "SKIP: $engine: bindings/$engine/tests has no tests"
        continue
    fi
    echo "--- $engine, its interface stubbed"
    check --rootdir "$home/tests" "$home"/tests/test_*.py
    if [ -d "$home/tests/engine" ]; then
        echo "--- $engine itself"
        KVTIER_ENGINES=1 check --rootdir "$home/tests" "$home/tests/engine"
    fi
done

if [ -n "$bench" ]; then
    ran=" "
    for engine in python $engines; do
        home=$engine
        if [ "$engine" = lmdeploy ]; then home=mooncake; fi # one script has the bars of both
        case $ran in *" $home "*) continue ;; esac
        ran="$ran$home "
        echo "--- what $engine costs (bindings/$home/bench.py)"
        KVTIER_ENGINES=1 "$python" "$root/bindings/$home/bench.py" || failed=1
    done
fi
exit $failed
