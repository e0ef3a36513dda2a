#!/bin/bash
# Checks the Node.js example against a built library:
#
#   bindings/node/test.sh PREBUILT WORK
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). npm installs koffi, the FFI, to WORK. If Node.js is
# missing, root on Debian installs it; otherwise the script is skipped (status 77).
set -euo pipefail
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
here=$(cd "$(dirname "$0")" && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)

skip() {
    echo "SKIP: node: $*"
    exit 77
}
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || skip "missing node or npm: install both"
    { apt-get update && apt-get install -y --no-install-recommends nodejs npm; } \
        >"$work/apt.log" 2>&1 || skip "node could not be installed: see $work/apt.log"
fi
major=$(node -p 'process.versions.node.split(".")[0]')
[ "$major" -ge 18 ] || skip "node is version $major, 18 or newer is needed"

# Works on a copy, so that npm does not write to the sources.
rm -rf "$work/tree"
mkdir -p "$work/tree/bindings" "$work/tree/ffi-tests/abi" "$work/tree/include/kvtier"
cp -r "$here" "$work/tree/bindings/node"
cp "$here/../../ffi-tests/abi/layout.txt" "$work/tree/ffi-tests/abi/"
cp "$here/../../include/kvtier/kvtier.json" "$work/tree/include/kvtier/"
cd "$work/tree/bindings/node"
rm -rf node_modules
npm install --no-package-lock --ignore-scripts --no-audit --no-fund >"$work/npm.log" 2>&1 ||
    skip "koffi could not be installed: see $work/npm.log"

export KVTIER_LIBRARY=$prebuilt/lib/libkvtier.so
node --test --test-reporter=tap test/kvtier.test.js | tee "$work/test.log"
node --expose-gc test/kvtier.test.js >"$work/gc.log" || { cat "$work/gc.log"; exit 1; }
node example.js | tee "$work/example.log"
grep -q 'loaded: every byte is equal' "$work/example.log"
sed -n '/^```js$/,/^```$/p' README.md | sed '1d;$d' | diff - hello.js
{ node hello.js && node hello.js; } | tee "$work/hello.log"
[ "$(cat "$work/hello.log")" = 'stored 96 tokens
loaded 96 tokens, the last number is 7' ]
# A package has the description of the interface.
npm pack --silent >"$work/pack.log"
tar -tzf kvtier-*.tgz >"$work/packed.log"
grep -q '^package/kvtier.json$' "$work/packed.log"
echo "$(sed -n 's/^# pass //p' "$work/test.log") passed, 0 failed, with Node.js $(node --version)"
