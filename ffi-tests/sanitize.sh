#!/bin/sh
# The C programs with the address or the thread sanitizer inside the library, too.
#
#   ffi-tests/sanitize.sh asan|tsan WORKDIR [FILE.c [ARGUMENT]]
#
# With a file, that program alone is built and run, its output shown, its status given.
# Rust's sanitizers are unstable flags, so the compiler is told to take them; it must
# come with the sanitizers' runtimes. The C side is built by clang against the same.
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
[ -n "$runtime" ] || skip "this Rust comes without the $name sanitizer's runtime"
command -v clang >/dev/null || skip "clang is not here"

# The standard library is not rebuilt with the sanitizer; that mix must be allowed.
flags="-Zsanitizer=$name -Cforce-frame-pointers=yes -Cdebuginfo=1"
[ "$kind" = tsan ] && flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer"
target=${CARGO_TARGET_DIR:-$root/target}/$kind
(cd "$root" && RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" CARGO_TARGET_DIR=$target \
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_STRIP=none \
    cargo rustc --locked --package kvtier --lib --no-default-features --features redis,dir --release --target "$host" \
    --crate-type cdylib) >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; exit 1; }
# The shared object is linked once, the archive would be for each program. Its soname is in it.
soname=$(readelf -d "$target/$host/release/libkvtier.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
cp "$target/$host/release/libkvtier.so" "$work/$soname"
ln -sf "$soname" "$work/libkvtier.so"

# Is it really in? The library itself must call the runtime, which it has not inside.
nm -D --undefined-only "$work/libkvtier.so" | grep "U $mark" >"$work/marks" || true
marks=$(wc -l <"$work/marks")
[ "$marks" -gt 3 ] || { echo "FAIL  the $name sanitizer is not in the library"; exit 1; }
echo "ok    the library calls $marks functions of the $name sanitizer"

libs="-lpthread -ldl -lm -lrt -lgcc_s"
passed=1
failed=0
# Without this a run that reports might still exit with 0.
ASAN_OPTIONS=exitcode=9:detect_leaks=1:detect_stack_use_after_return=1
TSAN_OPTIONS=exitcode=9:halt_on_error=0:second_deadlock_stack=1:suppressions=$here/sanitize/tsan.supp
KVT_TEST_SECONDS=900
export ASAN_OPTIONS TSAN_OPTIONS KVT_TEST_SECONDS

# build NAME SOURCE: the C side, the library, one runtime for both (Rust's own, which
# rustc leaves out of a shared object).
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
one store_wish 1
one outsider texts appends budgets
one blocks 1
one remote
one remote_custom
one offload_wish
one stream_wish
one device_wish
one offload_device_wish
one sparse_wish
one store_stress 6000
one pool 6000
one panic
one stress 60000
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
