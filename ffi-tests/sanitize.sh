#!/bin/sh
# Runs the C programs with the address or the thread sanitizer, which also instruments the library.
#
#   ffi-tests/sanitize.sh asan|tsan WORKDIR [FILE.c [ARGUMENT]]
#
# With a file, builds and runs that program only, and exits with its status. Rust's sanitizers are
# unstable flags, which RUSTC_BOOTSTRAP=1 allows. The Rust toolchain must have the sanitizers'
# runtimes; clang builds the C programs against the same runtime.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
kind=${1:?usage: sanitize.sh asan|tsan WORKDIR}
mkdir -p "${2:?usage: sanitize.sh asan|tsan WORKDIR}"
work=$(cd "$2" && pwd)
host=$(rustc -vV | sed -n 's/^host: //p')
case $kind in
asan) name=address mark=__asan_report_load ;;
tsan) name=thread mark=__tsan_read ;;
*) echo "usage: sanitize.sh asan|tsan WORKDIR"; exit 2 ;;
esac
skip() { echo "SKIP: $1"; exit 77; }
runtime=$(find "$(rustc --print sysroot)/lib/rustlib/$host/lib" -name "librustc*_rt.$kind.a" \
    2>/dev/null | head -n 1)
[ -n "$runtime" ] || skip "this Rust toolchain has no runtime of the $name sanitizer"
command -v clang >/dev/null || skip "clang is not installed"

# The standard library is not instrumented; the compiler must allow this mix.
flags="-Zsanitizer=$name -Cforce-frame-pointers=yes -Cdebuginfo=1"
[ "$kind" = tsan ] && flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer"
target=${CARGO_TARGET_DIR:-$root/target}/$kind
(cd "$root" && RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" CARGO_TARGET_DIR=$target \
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_STRIP=none \
    cargo rustc --locked --package kvtier --lib --no-default-features --features redis,dir --release --target "$host" \
    --crate-type cdylib) >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; exit 1; }
# Use the shared library: it is linked once, the archive would be linked into each program.
soname=$(readelf -d "$target/$host/release/libkvtier.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
cp "$target/$host/release/libkvtier.so" "$work/$soname"
ln -sf "$soname" "$work/libkvtier.so"

# Check that the library is instrumented: it must call the runtime, which it does not contain.
nm -D --undefined-only "$work/libkvtier.so" | grep "U $mark" >"$work/marks" || true
marks=$(wc -l <"$work/marks")
[ "$marks" -gt 3 ] || { echo "FAIL  the $name sanitizer is not in the library"; exit 1; }
echo "ok    the library calls $marks functions of the $name sanitizer"

libs="-lpthread -ldl -lm -lrt -lgcc_s"
passed=1
failed=0
# Without these options a run with reports may exit with 0.
ASAN_OPTIONS=exitcode=9:detect_leaks=1:detect_stack_use_after_return=1
TSAN_OPTIONS=exitcode=9:halt_on_error=0:second_deadlock_stack=1:suppressions=$here/sanitize/tsan.supp
KVT_TEST_SECONDS=900
export ASAN_OPTIONS TSAN_OPTIONS KVT_TEST_SECONDS

# build NAME SOURCE: links a C program, the library and one runtime for both. The runtime is that of
# Rust, which rustc does not link into a shared library.
build() {
    clang -std=c11 -g -O1 -fno-omit-frame-pointer "-fsanitize=$name" -Wall -Wextra -pedantic \
        -Werror -pthread -I"$root/include" -c "$2" -o "$work/$1.o"
    # shellcheck disable=SC2086
    clang -g -pthread "$work/$1.o" -Wl,--whole-archive "$runtime" -Wl,--no-whole-archive \
        -Wl,--export-dynamic -L"$work" -lkvtier "-Wl,-rpath,$work" $libs -lstdc++ -o "$work/$1"
    nm "$work/$1" >"$work/$1.nm"
    grep -q "$mark" "$work/$1.nm" || { echo "FAIL  $1 has no $name sanitizer"; exit 1; }
}

one() {
    program=$1
    shift
    build "$program" "$here/c/$program.c"
    status=0
    "$work/$program" "$@" >"$work/$program.out" 2>&1 || status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok    $program"
    else
        failed=$((failed + 1))
        echo "FAIL  $program (status $status)"
        head -n 60 "$work/$program.out"
    fi
}

if [ $# -gt 2 ]; then
    program=$(basename "$3" .c)
    build "$program" "$3"
    shift 3
    exec "$work/$program" "$@"
fi
one handles
one structs
one lifecycle 60
one ops 300
one queue
one budget 1000
one policy 2000
one trace 300
one store 1
one store_plan 1
one store_engine 1
one outsider texts appends budgets
one blocks 1
one remote
one remote_custom
one offload_engine
one stream_engine
one device_engine
one offload_device_engine
one sparse_engine
one store_stress 6000
one pool 6000
one panic
one stress 60000
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
