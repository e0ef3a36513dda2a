#!/bin/bash
# Builds the plugin and tests it in real NIXL agents, on the processor:
#
#   bindings/nixl/test.sh PREBUILT WORK [--bench]
#
# PREBUILT has lib/libkvtier.a or .so (see cmake/build.sh). WORK gets a virtual environment with NIXL's wheel and
# numpy (200 MB), NIXL's source tree, whose headers the wheel lacks, and the build. KVTIER_NIXL_SOURCE names
# a source tree that is there already, KVTIER_NIXL_PYTHON an interpreter that has NIXL, numpy and pytest.
# --bench also measures the plugin beside NIXL's POSIX plugin. A part that cannot run prints SKIP and the reason.
set -uo pipefail
prebuilt=${1:?usage: test.sh PREBUILT WORK [--bench]}
work=${2:?usage: test.sh PREBUILT WORK [--bench]}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prebuilt=$(cd "$prebuilt" && pwd) || exit 1
mkdir -p "$work" && work=$(cd "$work" && pwd) || exit 1
wheel=1.5.1
# The interface of 1.5.1 is that of this tag, the newest with public headers when this was written.
tag=v1.4.0

for tool in cmake c++; do
    command -v $tool >/dev/null || { echo "SKIP: the plugin needs $tool"; exit; }
done
source=${KVTIER_NIXL_SOURCE:-$work/source}
if [ -n "${KVTIER_NIXL_SOURCE:-}" ]; then
    if [ ! -f "$source/src/api/cpp/backend/backend_plugin.h" ]; then
        echo "KVTIER_NIXL_SOURCE=$source has no src/api/cpp/backend/backend_plugin.h: give NIXL's source tree, 1.4 or later" >&2
        exit 1
    fi
elif [ ! -f "$source/src/api/cpp/backend/backend_plugin.h" ]; then
    rm -rf "$source" # an interrupted clone
    if ! git clone -q --depth 1 --branch $tag https://github.com/ai-dynamo/nixl "$source"; then
        echo "SKIP: NIXL's source tree cannot be had: set KVTIER_NIXL_SOURCE"
        exit
    fi
fi
python=${KVTIER_NIXL_PYTHON:-$work/venv/bin/python}
usable() { "$python" -c 'import nixl._api, numpy, pytest' 2>"$work/import.log"; }
if ! usable; then
    if [ -n "${KVTIER_NIXL_PYTHON:-}" ]; then
        echo "KVTIER_NIXL_PYTHON=$python cannot import nixl, numpy and pytest: $(tail -n 1 "$work/import.log")" >&2
        exit 1
    fi
    pip() { "$python" -m pip install -q --disable-pip-version-check "$@"; }
    if ! { "$python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv --clear "$work/venv"; } ||
        ! pip numpy pytest || ! pip --no-deps nixl==$wheel nixl-cu12==$wheel; then
        echo "SKIP: pip cannot install NIXL $wheel"
        exit
    fi
    if ! usable; then
        echo "SKIP: NIXL cannot be imported: $(tail -n 1 "$work/import.log")"
        exit
    fi
fi

cmake -S "$here" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DKVTIER_NIXL_SOURCE="$source" \
    -DKVTIER_PREBUILT_DIR="$prebuilt" -DKVTIER_NIXL_AS_OBJ=ON >"$work/cmake.log" &&
    cmake --build "$work/build" --parallel 2 >>"$work/cmake.log" 2>&1 &&
    rm -rf "$work/plugins" && cmake --install "$work/build" --strip --prefix "$work/plugins" >>"$work/cmake.log" ||
    { tail -n 40 "$work/cmake.log"; exit 1; }

export KVTIER_NIXL_PYTHON=$python KVTIER_NIXL_PLUGINS=$work/plugins
"$python" -m pytest -ra -p no:cacheprovider --rootdir "$here/tests" "$here/tests" || exit 1
if [ "${3:-}" = --bench ]; then "$python" "$here/bench.py" "$work/plugins" "$work/bench" || exit 1; fi
