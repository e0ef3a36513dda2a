#!/bin/bash
# Runs stages of ffi-tests/run again and again on a busy machine, and says which failed:
#
#   ffi-tests/busy.sh ROUNDS [STAGE...]
#
# Stages are those of ffi-tests/run; without any: rust ctest python languages. Beside them run 8
# loops that do nothing but compute (KVTIER_BUSY_LOOPS sets another number). No test may fail for
# that: a test that does depends on how fast the machine is. What is built once is built before the
# loops start. Works where ffi-tests/run does (KVTIER_TEST_DIR); the logs of each round are kept
# in busy/ROUND there. The status says whether any stage failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: ffi-tests/busy.sh ROUNDS [STAGE...]"
rounds=${1:?$usage}
case $rounds in '' | *[!0-9]* | 0) echo "$usage" && exit 2 ;; esac
shift
stages=${*:-rust ctest python languages}
loops=${KVTIER_BUSY_LOOPS:-8}
work=${KVTIER_TEST_DIR:-$here/build}
mkdir -p "$work"
work=$(cd "$work" && pwd)
rm -rf "$work/busy" && mkdir -p "$work/busy"

# What stages take is built before the loops start.
"$here/run" plain dist || exit 1

busy=""
running=""
end_all() {
    trap - EXIT INT TERM HUP
    # The stages are a group of their own: what they have started ends with them.
    [ -z "$running" ] || kill -- "-$running" 2>/dev/null
    # shellcheck disable=SC2086
    [ -z "$busy" ] || kill $busy 2>/dev/null
    wait 2>/dev/null
}
trap end_all EXIT
trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM HUP

for _ in $(seq "$loops"); do
    # Ends also when this script is killed in a way that it cannot see.
    (while kill -0 $$ 2>/dev/null; do for _ in {1..100000}; do :; done; done) &
    busy="$busy $!"
done

lines=""
failures=0
for round in $(seq "$rounds"); do
    start=$SECONDS
    rm -f "$work/log"/*.status
    set -m
    # shellcheck disable=SC2086
    "$here/run" $stages >"$work/busy/$round.log" 2>&1 </dev/null &
    running=$!
    set +m
    wait "$running"
    status=$?
    running=""
    cp -r "$work/log" "$work/busy/$round" 2>/dev/null
    failed=""
    for stage in $stages; do
        code=$(cat "$work/log/$stage.status" 2>/dev/null || echo none)
        case $code in 0 | 77) ;; *) failed="$failed $stage" ;; esac
    done
    # A status of its own without a stage that failed: no such stage, no disk.
    if [ -z "$failed" ] && [ "$status" -ne 0 ]; then failed=" (status $status)"; fi
    if [ -z "$failed" ]; then
        line="round $round: passed, $((SECONDS - start)) s"
    else
        failures=$((failures + 1))
        line="round $round: FAILED:$failed, $((SECONDS - start)) s; logs in $work/busy/$round"
        tail -n 40 "$work/busy/$round.log"
    fi
    echo "$line"
    lines="$lines$line"$'\n'
done

echo
echo "=== $rounds rounds of $stages beside $loops busy loops"
printf '%s' "$lines"
echo "$failures of $rounds rounds failed"
[ "$failures" -eq 0 ]
