#!/bin/bash
# Tests the connectors against real engines, on the CPU:
#
#   ffi-tests/engines.sh PREBUILT WORK [--bench] [ENGINE...]
#
# ENGINE is llama.cpp, nixl, candle, lmdeploy, vllm, sglang, transformers, mooncake or lmcache;
# default: all. PREBUILT has lib/libkvtier.so (see cmake/build.sh). llama.cpp is an unmodified
# llama-server, built in WORK/../llama; nixl is a plugin for NIXL's wheel, built in WORK/../nixl;
# candle is examples/candle, built in WORK/candle with the library's sources; the others are Python
# packages. vLLM also runs whole, on the processor, alone and with LMCache, from an environment of its
# own in WORK/../vllm (8 GB). For the others WORK gets one (8 GB) with torch, transformers and the engines' wheels,
# without their dependencies: only their interfaces are used.
# KVTIER_ENGINES_PYTHON names an interpreter that has all of them. With --bench the bench scripts
# run, too, and print one line per result, JSON or text; Mooncake's script has lmdeploy's results. A
# test that cannot run prints SKIP and the reason.
set -uo pipefail
prebuilt=${1:?usage: engines.sh PREBUILT WORK [--bench] [ENGINE...]}
work=${2:?usage: engines.sh PREBUILT WORK [--bench] [ENGINE...]}
shift 2
bench=""
if [ "${1:-}" = --bench ]; then bench=1 && shift; fi
known="llama.cpp nixl candle lmdeploy vllm sglang transformers mooncake lmcache"
engines=${*:-$known}
for engine in $engines; do
    case " $known " in *" $engine "*) ;; *) echo "unknown engine '$engine': use $known" && exit 2 ;; esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd) || exit 1
mkdir -p "$work" && work=$(cd "$work" && pwd) || exit 1
unset KVTIER_LIBRARY PYTHONPATH
failed=0
beside=$(dirname "$work")
packages=""
for engine in $engines; do
    case $engine in
        llama.cpp)
            echo "--- llama.cpp, an unmodified llama-server"
            "$root/bindings/llama.cpp/server_test.sh" "$prebuilt" "$beside/llama" ${bench:+--bench} || failed=1
            ;;
        nixl)
            echo "--- NIXL, its wheel with the plugin"
            "$root/bindings/nixl/test.sh" "$prebuilt" "$beside/nixl" ${bench:+--bench} || failed=1
            ;;
        candle)
            echo "--- candle, an engine in Rust"
            "$root/examples/candle/test.sh" "$work/candle" ${bench:+--bench} || failed=1
            ;;
        *) packages="$packages $engine" ;;
    esac
done
engines=$packages
[ -n "${engines// /}" ] || exit $failed
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Engines must not use the network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# The versions that the connectors are written for.
declare -A wheels=([lmdeploy]="lmdeploy==0.18.0" [vllm]="vllm==0.33.0 lmcache==0.5.6"
    [sglang]="sglang==0.5.23" [transformers]=""
    [mooncake]="lmdeploy==0.18.0 vllm==0.33.0 sglang==0.5.23" [lmcache]="lmcache==0.5.6")
base="torch==2.15.0 transformers==5.23.0 numpy pytest mypy"
# Imports of the engines' interfaces, and tools of the checks.
small="msgspec pydantic psutil xxhash safetensors ml_dtypes auditwheel pyright"
# Imports of SGLang's storage and controller.
small="$small aiohttp apache-tvm-ffi compressed-tensors dill gguf ipython loguru orjson pillow \
pybase64 pyzmq requests sentencepiece setproctitle starlette torchvision uvloop"
# Imports of LMCache's engine and backends.
small="$small aiofile cachetools cryptography numba prometheus_client py-cpuinfo sortedcontainers"
# Imports of SGLang's whole engine, and of lmdeploy's. The rest of their requirements are GPU kernels.
small="$small accelerate einops fastapi mmengine-lite openai partial-json-parser protobuf python-multipart \
shortuuid tiktoken uvicorn watchfiles xgrammar zstandard"
# SGLang compiles its page hash at the first use, with ninja and OpenSSL's headers.
small="$small ninja"

environment() {
    local free_mib engine
    free_mib=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') / 1024))
    if [ ! -x "$work/venv/bin/python" ] && [ "$free_mib" -lt 12288 ]; then
        echo "SKIP: torch and the engines need 12 GiB of disk under $work, which has $free_mib MiB free"
        return 77
    fi
    # An interrupted start leaves an interpreter without pip.
    "$work/venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        "${PYTHON:-python3}" -m venv --clear "$work/venv" || return 1
    # shellcheck disable=SC2086
    if ! "$work/venv/bin/python" -m pip install -q $base $small; then
        echo "SKIP: pip cannot install torch, transformers and small packages"
        return 77
    fi
    for engine in $engines; do
        [ -n "${wheels[$engine]}" ] || continue
        # shellcheck disable=SC2086
        "$work/venv/bin/python" -m pip install -q --no-deps ${wheels[$engine]} ||
            echo "SKIP: pip cannot install ${wheels[$engine]}; its tests are skipped"
    done
}

headers() {
    case " $engines " in *" sglang "*) ;; *) return ;; esac
    echo '#include <openssl/sha.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null && return
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        { apt-get update && apt-get install -y --no-install-recommends g++ libssl-dev; } \
            >"$work/apt.log" 2>&1 && return
    fi
    echo "SKIP: SGLang's own threads need a C++ compiler and OpenSSL's headers; install libssl-dev"
    export KVTIER_NO_SGLANG_HASH=1
}

headers
python=${KVTIER_ENGINES_PYTHON:-}
if [ -z "$python" ]; then
    environment || {
        status=$?
        # A skip must not hide a failure before it.
        [ $failed -eq 0 ] || status=1
        exit $status
    }
    python=$work/venv/bin/python
fi

# Install the wheel into a separate folder, so that a given interpreter is not changed.
rm -rf "$work/dist" "$work/kvtier"
"$python" "$root/bindings/python/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist" &&
    "$python" -m pip install -q --no-index --no-deps --target "$work/kvtier" \
        "$work"/dist/kvtier-*.whl || exit 1
export PYTHONPATH=$work/kvtier
# Programs of the environment, and a separate folder for code that engines compile.
PATH=$(dirname "$python"):$PATH
export PATH TORCH_EXTENSIONS_DIR=$work/extensions

cd "$work" || exit 1
check() {
    local status=0 log=$work/log
    "$python" -m pytest -ra -p no:cacheprovider -c "$root/bindings/python/pyproject.toml" "$@" |
        tee "$log"
    status=${PIPESTATUS[0]}
    # Status 5: no test was collected. If every test is skipped, report SKIP, too.
    if [ "$status" -eq 5 ] || { [ "$status" -eq 0 ] && ! tail -n 1 "$log" | grep -q ' passed'; }
    then
        echo "SKIP: no test of ${*: -1} can run here"
        return
    fi
    [ "$status" -eq 0 ] || failed=1
}

echo "--- the package: tests that need torch or auditwheel"
tests=$root/bindings/python/tests
check --rootdir "$root/bindings/python" "$tests/test_tensors.py" "$tests/test_buffer.py" \
    "$tests/test_process.py"
if "$python" -m pyright --version >/dev/null 2>&1; then
    (cd "$root/bindings/python" && "$python" -m pyright --pythonpath "$python" \
        kvtier bench.py build_wheel.py generate.py) || failed=1
else
    echo "SKIP: pyright cannot run: it needs node, and the network for its first start"
fi
echo "--- the GPU tests, on tensors in host memory"
"$python" "$root/ffi-tests/gpu/python_paths.py" --device cpu --quick || failed=1
# Connector tests may import from the source tree, which has no library.
export KVTIER_LIBRARY=$prebuilt/lib/libkvtier.so
for engine in $engines; do
    folder=$root/bindings/$engine
    if ! compgen -G "$folder/tests/test_*.py" >/dev/null; then
        echo "SKIP: $engine: bindings/$engine/tests has no tests"
        continue
    fi
    echo "--- $engine, with a stub of its interface"
    check --rootdir "$folder/tests" "$folder"/tests/test_*.py
    if [ -d "$folder/tests/engine" ]; then
        echo "--- $engine, the real engine"
        KVTIER_ENGINES=1 check --rootdir "$folder/tests" "$folder/tests/engine"
    fi
done

# Interfaces of older and newer engines: only the sources in their wheels are fetched (some 10 MB each).
for engine in $engines; do
    case $engine in mooncake | lmcache) continue ;; esac
    echo "--- $engine, the interfaces of other versions"
    KVTIER_VERSIONS=$work/versions check --rootdir "$root/ffi-tests/versions" -k "$engine" \
        "$root/ffi-tests/versions/test_versions.py"
done

for engine in $engines; do
    case $engine in
        vllm)
            echo "--- vllm, a whole engine for processors"
            "$root/bindings/vllm/real_test.sh" "$prebuilt" "$beside/vllm" ${bench:+--bench} || failed=1
            ;;
        lmcache)
            echo "--- lmcache in a whole vLLM for processors"
            "$root/bindings/vllm/real_test.sh" "$prebuilt" "$beside/vllm" --lmcache || failed=1
            ;;
    esac
done

if [ -n "$bench" ]; then
    ran=" "
    for engine in python $engines; do
        binding=$engine
        if [ "$engine" = lmdeploy ]; then binding=mooncake; fi # one script measures both
        case $ran in *" $binding "*) continue ;; esac
        ran="$ran$binding "
        echo "--- benchmark of $engine (bindings/$binding/bench.py)"
        KVTIER_ENGINES=1 "$python" "$root/bindings/$binding/bench.py" || failed=1
    done
fi
exit $failed
