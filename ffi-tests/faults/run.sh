#!/bin/sh
# Plants each fault and sees it caught by the gate that is there for it; and sees the
# same program pass that gate without the fault, so that the gate does tell.
#
#   ffi-tests/faults/run.sh LIBDIR WORKDIR
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
libdir=$(cd "${1:?usage: run.sh LIBDIR WORKDIR}" && pwd)
mkdir -p "${2:?usage: run.sh LIBDIR WORKDIR}"
work=$(cd "$2" && pwd)
cc=${CC:-cc}
passed=0
failed=0

caught() { passed=$((passed + 1)); echo "caught $1"; }
missed() { failed=$((failed + 1)); echo "MISSED $1"; [ $# -lt 2 ] || head -n 20 "$2"; }

compile() {
    "$cc" -std=c11 -g -O1 -Wall -Wextra -pedantic -Werror -pthread -I"$root/include" \
        "$here/$1.c" -o "$work/$1" -L"$libdir" -lkvtier "-Wl,-rpath,$libdir"
}

# gate NAME WORDS COMMAND...: with the fault the command fails and says the words,
# with the argument "clean" it succeeds.
gate() {
    name=$1 words=$2
    shift 2
    log=$work/$(echo "$name" | tr -c 'a-z\n' -).log
    status=0
    "$@" >"$log" 2>&1 || status=$?
    if [ "$status" -eq 77 ]; then
        echo "skip   $name: $(tail -n 1 "$log")"
        return 0
    fi
    if [ "$status" -eq 0 ] || ! grep -qE "$words" "$log"; then
        missed "$name" "$log"
    elif ! "$@" clean >"$log" 2>&1; then
        missed "$name (it cries without a fault, too)" "$log"
    else
        caught "$name"
    fi
}

# call NAME STATUS: the library itself says what is wrong.
call() {
    got=$("$work/calls" "$1" 2>&1) || got="$got (failed)"
    if [ "$got" = "$2" ]; then caught "$1 ($2)"; else missed "$1: $got, not $2"; fi
}

compile calls
[ "$("$work/calls" none)" = KVT_OK ] || { echo "FAIL  the program without a fault"; exit 1; }
call panic KVT_E_PANIC
call bad-enum KVT_E_INVALID
call bad-kind KVT_E_INVALID
call short-struct KVT_E_INVALID
call long-struct KVT_E_TOO_NEW
call stale KVT_E_HANDLE
call foreign KVT_E_HANDLE
call wrong-type KVT_E_HANDLE
call beyond-the-end KVT_E_INVALID

if command -v valgrind >/dev/null; then
    memcheck="valgrind --quiet --tool=memcheck --leak-check=full --error-exitcode=9 --fair-sched=yes"
    compile overrun
    compile leak
    # shellcheck disable=SC2086
    gate "overrun, by memcheck" 'Invalid read' $memcheck "$work/overrun"
    # shellcheck disable=SC2086
    gate "leak, by memcheck" 'definitely lost' $memcheck "$work/leak"
else
    echo "skip   memcheck: valgrind is not here"
fi
sanitize=$here/../sanitize.sh
gate "overrun, by the address sanitizer" 'heap-buffer-overflow' \
    "$sanitize" asan "$work/asan" "$here/overrun.c"
gate "leak, by the address sanitizer" 'detected memory leaks' \
    "$sanitize" asan "$work/asan" "$here/leak.c"
gate "race, by the thread sanitizer" 'data race' "$sanitize" tsan "$work/tsan" "$here/race.c"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
