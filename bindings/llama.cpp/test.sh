#!/bin/bash
# Tests the adapters for llama.cpp with a built library, a real engine and real models:
#
#   bindings/llama.cpp/test.sh PREBUILT WORK [ctest arguments]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). The engine, the models and the builds go to WORK
# and are reused. KVTIER_ENGINE=old tests with the older engine of engine.sh, in WORK/old, without the demo.
# Needs cmake, ninja, python3 with pip, cargo.
set -euo pipefail
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)

engine=${KVTIER_ENGINE:-new}
"$here/models.sh" "$work" smollm2 gemma3 tiny
if [ "$engine" != new ]; then
    mkdir -p "$work/$engine/models"
    ln -sf "$work"/models/{smollm2,gemma3,tiny-*}.gguf "$work/$engine/models/"
    ln -sfn "$work/models-python" "$work/$engine/models-python"
    work=$work/$engine
fi
"$here/engine.sh" "$work" "$engine"
"$here/models.sh" "$work" archs

# Install kvtier as an engine author would.
cmake -S "$root" -B "$work/kvtier-build" -G Ninja -DKVTIER_PREBUILT_DIR="$prebuilt" \
    -DCMAKE_INSTALL_PREFIX="$work/kvtier" -DCMAKE_INSTALL_LIBDIR=lib >"$work/kvtier.log"
cmake --install "$work/kvtier-build" >>"$work/kvtier.log"

cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O1 -DCMAKE_CXX_FLAGS=-O1 \
    -DCMAKE_PREFIX_PATH="$work/engine;$work/kvtier" -DKVTIER_LLAMA_SOURCE="$work/engine-src" \
    -DKVTIER_LLAMA_TESTS=ON -DKVTIER_LLAMA_MODELS="$work/models" >"$work/cmake.log"
cmake --build "$work/build"
# Tests labelled `long` (large models) run in the soak only.
ctest --test-dir "$work/build" --output-on-failure -LE long -j "$(nproc)" "$@" | tee "$work/ctest.log"
# Everything that a test needs was made or fetched above, so no test may be skipped in CI.
if [ -n "${CI:-}" ] && grep -q '[*]Skipped' "$work/ctest.log"; then
    echo "tests were skipped: see $work/ctest.log"
    exit 1
fi
[ $# -eq 0 ] && [ "$engine" = new ] || exit 0

# The four parts of the demo, with tiny models.
KVTIER_PREBUILT=$prebuilt "$here/demo/run" "$work" --quick
