#!/bin/bash
# Tests `kvtier run` with an unmodified llama-server, which server.sh builds:
#
#   bindings/llama.cpp/server_test.sh PREBUILT WORK [--bench]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). Engine, server, models and builds go to WORK and are
# reused. --bench also measures, for half an hour.
set -euo pipefail
prebuilt=${1:?usage: server_test.sh PREBUILT WORK [--bench]}
work=${2:?usage: server_test.sh PREBUILT WORK [--bench]}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)

"$here/models.sh" "$work" smollm2 tiny
"$here/engine.sh" "$work"
"$here/server.sh" "$work"
cmake -S "$root" -B "$work/kvtier-build" -G Ninja -DKVTIER_PREBUILT_DIR="$prebuilt" \
    -DCMAKE_INSTALL_PREFIX="$work/kvtier" -DCMAKE_INSTALL_LIBDIR=lib >"$work/kvtier.log"
cmake --install "$work/kvtier-build" >>"$work/kvtier.log"
cmake -S "$here" -B "$work/run-build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O2 \
    -DCMAKE_PREFIX_PATH="$work/engine;$work/kvtier" -DKVTIER_LLAMA_SOURCE="$work/engine-src" >"$work/run.log"
cmake --build "$work/run-build" --target kvtier-run >>"$work/run.log"

programs=(--server "$work/server/bin/llama-server" --library "$work/run-build/run/libkvtier-run.so"
    --model "$work/models/smollm2.gguf")
# As wide as SmolLM2.
"$work/models-python/bin/python" "$here/models/vision.py" "$work/models/vision.gguf" --width 576
python3 "$here/tests/run/server.py" "${programs[@]}" --hybrid "$work/models/tiny-hybrid.gguf" \
    --vision "$work/models/vision.gguf"
[ "${3:-}" != --bench ] || python3 "$here/tests/run/bench.py" "${programs[@]}"
