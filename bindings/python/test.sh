#!/bin/sh
# Checks the Python binding against a built library:
#
#   bindings/python/test.sh PREBUILT WORK [pytest arguments]
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh); a virtual environment and
# the wheel go to WORK. Honours PYTHON.
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
"$work/venv/bin/pytest" -c "$here/pyproject.toml" -p no:cacheprovider "$here/tests" "$@"
