#!/bin/sh
# Builds llama.cpp from a package and installs it, as an engine author would have it:
#
#   bindings/llama.cpp/engine.sh WORK [VERSION]
#
# VERSION is a version of the crate that has the source, or one of the two tested ones:
#   new   0.1.161: llama 0.6.0, ggml 0.26.0, sequence state 4, backend interface 3 (the default)
#   old   0.1.156: llama 0.1.0, ggml 0.19.0, sequence state 2, backend interface 2
#
# WORK/engine gets include/, lib/ and lib/cmake/. WORK/engine-src gets the source: the weights and the
# plugin are compiled against its private headers (ggml-backend-impl.h). Only libllama and ggml's CPU
# backend are built: 3 minutes on two cores. An existing build is kept.
# The build runs on any CPU with AVX2. KVTIER_ENGINE_NATIVE=ON builds for this CPU, as benchmarks need;
# valgrind cannot run that build on a CPU with AVX-512.
set -eu
work=${1:?usage: engine.sh WORK [VERSION]}
version=${2:-new}
case $version in
new) version=0.1.161 ;;
old) version=0.1.156 ;;
esac
mkdir -p "$work"
work=$(cd "$work" && pwd)
native=${KVTIER_ENGINE_NATIVE:-OFF}
stamp=$work/engine/built-$version-$native
[ -e "$stamp" ] && exit 0
rm -rf "$work/engine" "$work/engine-src" "$work/engine-build" "$work/engine-fetch"

mkdir -p "$work/engine-fetch/src"
cat >"$work/engine-fetch/Cargo.toml" <<END
[package]
name = "engine-fetch"
version = "0.0.0"
edition = "2021"
[workspace]
[dependencies]
llama-cpp-sys-2 = "=$version"
END
: >"$work/engine-fetch/src/lib.rs"
manifest=$work/engine-fetch/Cargo.toml
cargo fetch --quiet --manifest-path "$manifest"
source=$(cargo metadata --quiet --format-version 1 --offline --manifest-path "$manifest" | python3 -c '
import json, os, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] == "llama-cpp-sys-2":
        print(os.path.dirname(package["manifest_path"]))')
cp -r "$source/llama.cpp" "$work/engine-src"
# libllama only builds graphs, ggml computes them, so a lower optimisation level saves compile time. ggml
# keeps its own level. Benchmarks use the engine unchanged.
[ "$native" = ON ] || echo 'target_compile_options(llama PRIVATE -O1)' >>"$work/engine-src/src/CMakeLists.txt"

launcher=""
if command -v ccache >/dev/null; then
    launcher="-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
fi
off=""
for part in COMMON TESTS TOOLS EXAMPLES SERVER APP UI; do off="$off -DLLAMA_BUILD_$part=OFF"; done
# shellcheck disable=SC2086
cmake -S "$work/engine-src" -B "$work/engine-build" -G Ninja $off $launcher \
    -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF -DGGML_CCACHE=OFF -DGGML_NATIVE="$native" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_C_FLAGS="-O2 -DNDEBUG" -DCMAKE_CXX_FLAGS="-O2 -DNDEBUG" \
    -DCMAKE_INSTALL_PREFIX="$work/engine" -DCMAKE_INSTALL_LIBDIR=lib >"$work/engine.log" 2>&1 &&
    cmake --build "$work/engine-build" --target llama >>"$work/engine.log" 2>&1 &&
    cmake --install "$work/engine-build" >>"$work/engine.log" 2>&1 || {
    tail -n 40 "$work/engine.log"
    exit 1
}
rm -rf "$work/engine-build" "$work/engine-fetch"
touch "$stamp"
