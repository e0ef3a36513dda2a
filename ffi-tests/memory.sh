#!/bin/sh
# Runs the C programs under memcheck: no invalid access, no use of undefined bytes, no leak.
#
#   ffi-tests/memory.sh LIBDIR WORKDIR
#
# There are no suppressions. Memory that the library never frees (handle slots, the page that
# detects a fork) stays reachable, which memcheck does not report.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
libdir=$(cd "${1:?usage: memory.sh LIBDIR WORKDIR}" && pwd)
mkdir -p "${2:?usage: memory.sh LIBDIR WORKDIR}"
work=$(cd "$2" && pwd)
command -v valgrind >/dev/null || { echo "SKIP: valgrind is not installed"; exit 77; }
cc=${CC:-cc}
passed=0
failed=0
KVT_TEST_SECONDS=900
export KVT_TEST_SECONDS

# one NAME [ARGUMENT]: runs a program. Counts are low, because memcheck is about thirty times
# slower. Fair scheduling keeps a polling thread from starving the others.
one() {
    name=$1
    shift
    source=$here/c/$name.c
    [ -e "$source" ] || source=$root/examples/c/$name.c
    "$cc" -std=c11 -g -O1 -Wall -Wextra -pedantic -Werror -pthread -I"$root/include" \
        "$source" -o "$work/$name" -L"$libdir" -lkvtier -lm "-Wl,-rpath,$libdir"
    status=0
    valgrind --tool=memcheck "--leak-check=$leaks" --show-leak-kinds=definite,possible \
        --errors-for-leak-kinds=definite,possible --error-exitcode=9 --fair-sched=yes \
        --trace-children=no --child-silent-after-fork=yes --log-file="$work/$name.log" \
        "$work/$name" "$@" >"$work/$name.out" 2>&1 || status=$?
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name (status $status)"
        cat "$work/$name.out"
        head -n 60 "$work/$name.log"
    fi
}

leaks=full
one version
one hello_kv "$work/hello-kv-store"
one engine
one restart
one layerwise
one paged_views
one custom_policy
one policy_alone
one sparse_decode
one h2o_rows
one stream_weights
one custom_device
one custom_remote
one events_router
one handles
one structs
one spec 3000
one lifecycle 30
one ops 150
one queue
one budget 400
one log 60
one policy 200
one trace 300
one store 1
one store_plan 1
one store_engine 1
one blocks 1
one small_stack
one remote
one remote_custom
one offload_engine
one stream_engine
one device_engine
one offload_device_engine
one sparse_engine
one pool 2000
one panic
# A forked child is checked at its end, too. There the stacks of the parent's threads count as lost,
# so the leak check is off.
leaks=no
one fork 3
leaks=full
one quiet
one stress 20000
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
