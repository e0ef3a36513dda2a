#!/bin/sh
# Tests the Python binding, and the connectors in its wheel, with a built library:
#
#   bindings/python/test.sh PREBUILT WORK [pytest arguments]
#
# PREBUILT contains lib/libkvtier.so (see cmake/build.sh). The script writes a virtual
# environment and the wheel to WORK, and honours PYTHON. With pytest arguments it runs only the
# package's own tests. ffi-tests/engines.sh runs the tests that need an engine or torch.
set -eu
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)
# Tests the wheel, not another library or the source tree.
unset KVTIER_LIBRARY PYTHONPATH
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

[ -x "$work/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q pytest numpy xxhash mypy pyzmq msgspec

rm -rf "$work/dist"
"$work/venv/bin/python" "$here/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist"
"$work/venv/bin/pip" install -q --no-index --force-reinstall "$work"/dist/kvtier-*.whl

(cd "$here" && "$work/venv/bin/mypy" --cache-dir "$work/mypy")

cd "$work" # so that "kvtier" is the installed package
check() { "$work/venv/bin/pytest" -c "$here/pyproject.toml" -p no:cacheprovider "$@"; }
check "$here/tests" "$@"
[ $# -eq 0 ] || exit 0

echo "--- the GPU tests' Python paths, without a GPU"
if command -v "${CC:-cc}" >/dev/null 2>&1 && command -v "${CXX:-c++}" >/dev/null 2>&1; then
    "$work/venv/bin/python" "$here/../../ffi-tests/gpu/test_python_paths.py" "$work/gpu"
else
    echo "SKIP: no C and C++ compiler"
fi

echo "--- examples in the package's docstrings"
# Skips modules that need torch.
check --doctest-modules --doctest-ignore-import-errors --pyargs kvtier

# The connectors' tests may import the source tree, which contains no library.
export KVTIER_LIBRARY=$prebuilt/lib/libkvtier.so
for engine in lmdeploy vllm sglang mooncake transformers lmcache; do
    # Names files explicitly: the folder `engine` needs the real engine, and its tests read argv.
    set -- "$here/../$engine/tests"/test_*.py
    [ -e "$1" ] || continue
    echo "--- $engine, with a stub of its interface"
    status=0
    check --rootdir "$here/../$engine/tests" "$@" || status=$?
    # 5: no tests were collected, for example because all of them need torch.
    [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || exit "$status"
done
