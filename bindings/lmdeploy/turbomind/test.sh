#!/bin/bash
# Tests the adapter for TurboMind with a built library, in a miniature of the engine:
#
#   bindings/lmdeploy/turbomind/test.sh PREBUILT WORK [ctest arguments]
#
# PREBUILT contains lib/libkvtier.so (see cmake/build.sh). Needs cmake and a C++17 compiler. Runs
# without sanitizers, then with ASan and UBSan, then with TSan. NO_SANITIZE=1 skips the sanitizers.
set -euo pipefail
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

# Use an installed kvtier, as an engine author would.
cmake "${generator[@]}" -S "$root" -B "$work/kvtier-build" -DKVTIER_PREBUILT_DIR="$prebuilt" \
    -DCMAKE_INSTALL_PREFIX="$work/kvtier" -DCMAKE_INSTALL_LIBDIR=lib >"$work/kvtier.log"
cmake --install "$work/kvtier-build" >>"$work/kvtier.log"

check() {
    local name=$1 sanitize=$2
    shift 2
    cmake "${generator[@]}" -S "$here" -B "$work/$name" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DCMAKE_PREFIX_PATH="$work/kvtier" -DKVTIER_TURBOMIND_SANITIZE="$sanitize" >"$work/$name.log"
    cmake --build "$work/$name"
    ctest --test-dir "$work/$name" --output-on-failure "$@"
}

check plain "" "$@"
[ -z "${NO_SANITIZE:-}" ] || exit 0
check memory address,undefined "$@"
# The library is not instrumented, so TSan cannot see how it synchronises its threads.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1"
check threads thread "$@"
