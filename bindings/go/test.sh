#!/bin/bash
# Checks the Go example against a built library:
#
#   bindings/go/test.sh PREBUILT WORK
#
# PREBUILT has lib/libkvtier.so (see cmake/build.sh). The script installs it to WORK, where the package
# finds it by pkg-config. If Go is missing, root on Debian installs it; otherwise the script is skipped
# (status 77). NO_RACE=1 skips the tests under the race detector.
set -euo pipefail
prebuilt=${1:?usage: test.sh PREBUILT WORK}
work=${2:?usage: test.sh PREBUILT WORK}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prebuilt=$(cd "$prebuilt" && pwd)
mkdir -p "$work"
work=$(cd "$work" && pwd)

skip() {
    echo "SKIP: go: $*"
    exit 77
}
need=()
command -v go >/dev/null || need+=(golang-go)
command -v pkg-config >/dev/null || need+=(pkg-config)
command -v cmake >/dev/null || need+=(cmake)
if [ ${#need[@]} -gt 0 ]; then
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || skip "missing ${need[*]}: install them"
    { apt-get update && apt-get install -y --no-install-recommends "${need[@]}"; } \
        >"$work/apt.log" 2>&1 || skip "${need[*]} could not be installed: see $work/apt.log"
fi
command -v cc >/dev/null || command -v gcc >/dev/null || skip "no C compiler, which cgo needs: install cc or gcc"

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake "${generator[@]}" -S "$root" -B "$work/kvtier-build" -DKVTIER_PREBUILT_DIR="$prebuilt" \
    -DCMAKE_INSTALL_PREFIX="$work/kvtier" -DCMAKE_INSTALL_LIBDIR=lib >"$work/kvtier.log"
cmake --install "$work/kvtier-build" >>"$work/kvtier.log"

export PKG_CONFIG_PATH=$work/kvtier/lib/pkgconfig LD_LIBRARY_PATH=$work/kvtier/lib
export GOCACHE=$work/cache GOPATH=$work/path GOFLAGS=-buildvcs=false GOTOOLCHAIN=local GOPROXY=off CGO_ENABLED=1
cd "$here"
[ -z "$(gofmt -l .)" ] || { gofmt -d .; exit 1; }
go vet ./...
go test -count=1 -v . | tee "$work/test.log"
# cgo checks every pointer that is passed or stored. From Go 1.21 on the check is an experiment.
if [ "$(go env GOVERSION | sed 's/^go1\.\([0-9]*\).*/\1/')" -lt 21 ]; then
    GODEBUG=cgocheck=2 go test -count=1 ./...
else
    GOEXPERIMENT=cgocheck2 go test -count=1 ./...
fi
[ -n "${NO_RACE:-}" ] || go test -race -count=1 ./...
go run ./example | tee "$work/example.log"
grep -q 'loaded: every byte is equal' "$work/example.log"
sed -n '/^```go$/,/^```$/p' README.md | sed '1d;$d' | diff - example/hello/main.go
go build -o "$work/hello" ./example/hello
rm -rf "$work/hello-kv"
(cd "$work" && ./hello && ./hello) | tee "$work/hello.log"
[ "$(cat "$work/hello.log")" = 'stored 96 tokens
loaded 96 tokens, the last byte is 7' ]
echo "$(grep -c '^--- PASS' "$work/test.log") passed, 0 failed, with $(go env GOVERSION)"
