#!/bin/bash
# Runs stages of ffi-tests/run repeatedly on a busy machine, and reports which failed:
#
#   ffi-tests/busy.sh ROUNDS [STAGE...]     default stages: rust ctest python languages
#
# 8 compute loops run at the same time (KVTIER_BUSY_LOOPS sets another number). A test that fails
# only then depends on the speed of the machine, which is a defect of the test. Builds are made
# before the loops start. Works in the directory of ffi-tests/run (KVTIER_TEST_DIR), and keeps the
# logs of each round in busy/ROUND there. The exit status is 0 if no stage failed.
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

# Build what the stages need before the loops start.
"$here/run" plain dist || exit 1

busy=""
running=""
end_all() {
    trap - EXIT INT TERM HUP
    # The stages are a process group of their own, so this also ends their children.
    [ -z "$running" ] || kill -- "-$running" 2>/dev/null
    # shellcheck disable=SC2086
    [ -z "$busy" ] || kill $busy 2>/dev/null
    wait 2>/dev/null
}
trap end_all EXIT
trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM HUP

for _ in $(seq "$loops"); do
    # The loop also ends if this script is killed by SIGKILL.
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
    # The run failed outside of the stages: an unknown stage, a full disk.
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
