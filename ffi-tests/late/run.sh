#!/bin/sh
# Runs programs again and again with threads that are late at random (late.c), and says which fail:
#
#   ffi-tests/late/run.sh WORKDIR ROUNDS PROGRAM...
#
# Programs are anything that is tested by its status: those of ffi-tests/c and ffi-tests/cpp that
# ctest has built, test programs of cargo (from the root of the checkout). A failure is found by
# chance: the same seed would not find it again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: run.sh WORKDIR ROUNDS PROGRAM...}"
work=$(cd "$1" && pwd)
rounds=${2:?usage: run.sh WORKDIR ROUNDS PROGRAM...}
shift 2
"${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Werror -shared -fPIC "$here/late.c" -o "$work/late.so" -ldl

export LATE="$work/late.so" LOGS="$work"
failed=$(for round in $(seq "$rounds"); do
    for program in "$@"; do echo "$round $program"; done
done | xargs -P "$(nproc)" -L 1 sh -c '
    name=$(basename "$1") log=$LOGS/$(basename "$1").$0.log
    status=0
    LD_PRELOAD=$LATE timeout 600 "$1" >"$log" 2>&1 </dev/null || status=$?
    if [ $status -eq 0 ]; then rm "$log"; exit 0; fi
    echo "FAIL  $name, round $0: status $status, $log" >&2
    tail -n 3 "$log" >&2
    echo failed')
[ -z "$failed" ] || exit 1
echo "$rounds rounds of $# programs: none failed"
