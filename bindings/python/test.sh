#!/bin/sh
# Checks the Python binding, and the connectors in its wheel, against a built library:
#
#   bindings/python/test.sh PREBUILT WORK [pytest arguments]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh); a virtual environment and
# the wheel go to WORK. Honours PYTHON. With pytest arguments the package's own tests
# alone are run. What needs an engine, or torch, is for ffi-tests/engines.sh.
set -eu
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)
# The tests are for the wheel: neither another library nor the source tree.
unset KVTIER_LIBRARY PYTHONPATH
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

[ -x "$work/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q pytest numpy xxhash mypy

rm -rf "$work/dist"
"$work/venv/bin/python" "$here/build_wheel.py" --prebuilt "$prebuilt" --out "$work/dist"
"$work/venv/bin/pip" install -q --no-index --force-reinstall "$work"/dist/kvtier-*.whl

"$work/venv/bin/python" "$here/generate.py" --check
(cd "$here" && "$work/venv/bin/mypy" --cache-dir "$work/mypy")

cd "$work" # so that "kvtier" is the installed one
check() { "$work/venv/bin/pytest" -c "$here/pyproject.toml" -p no:cacheprovider "$@"; }
check "$here/tests" "$@"
[ $# -eq 0 ] || exit 0

echo "--- what is run on a GPU, without one"
if command -v "${CC:-cc}" >/dev/null 2>&1 && command -v "${CXX:-c++}" >/dev/null 2>&1; then
    "$work/venv/bin/python" "$here/../../ffi-tests/gpu/test_python_paths.py" "$work/gpu"
else
    echo "SKIP: there is no compiler"
fi

echo "--- examples in the words of the package"
# Parts that need torch are not for here.
check --doctest-modules --doctest-ignore-import-errors --pyargs kvtier

# Their tests may look at the source tree, which has no library in it.
export KVTIER_LIBRARY=$prebuilt/lib/libkvtier.so
for engine in lmdeploy vllm sglang mooncake transformers; do
    # By their names: what is in the folder `engine` needs one, and argv tells tests which it is.
    set -- "$here/../$engine/tests"/test_*.py
    [ -e "$1" ] || continue
    echo "--- $engine, its interface stubbed"
    status=0
    check --rootdir "$here/../$engine/tests" "$@" || status=$?
    # 5: there was nothing to run, as where all of it needs torch.
    [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || exit "$status"
done
