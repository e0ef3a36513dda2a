#!/bin/bash
# Runs long tests for a given time:  ffi-tests/soak.sh MINUTES PREBUILT WORKDIR
#
# `ffi-tests/run --soak MINUTES` builds the prerequisites and calls this script. The time is split:
#
#   1/3  seeds of the store's simulation
#   1/3  processes that are killed while they store
#   1/6  the C and C++ programs with random delays of threads
#   1/6  random programs over the ABI, and random tests with many cases
#
# Each part repeats short rounds until its time is over. It continues after a failure, and prints
# how to repeat a failing round. Some tests run before the parts, in extra time: the resident memory
# of large stores, also in a small cgroup; the suite of remotes on Swift, a real S3 service; and, if
# the stage `llama` has run before, its long tests with large models, and all its tests with the older
# engine. Seeds start at KVTIER_SOAK_FIRST (default: from the clock), so that two runs differ.
set -uo pipefail
minutes=${1:?usage: soak.sh MINUTES PREBUILT WORKDIR}
prebuilt=$(cd "${2:?usage: soak.sh MINUTES PREBUILT WORKDIR}" && pwd) || exit 1
mkdir -p "${3:?usage: soak.sh MINUTES PREBUILT WORKDIR}" && work=$(cd "$3" && pwd) || exit 1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
cd "$root" || exit 1
target=${CARGO_TARGET_DIR:-$root/target}
first=${KVTIER_SOAK_FIRST:-$(($(date +%s) * 1000))}
features="--features tls,seal,s3"
passed=0 failed=0

# part NAME SECONDS COMMAND...: repeats a command until the time is over. $round is the number of
# the round.
part() {
    local name=$1 until=$((SECONDS + $2)) log=$work/$1.log
    shift 2
    round=0
    export round
    while [ $SECONDS -lt $until ]; do
        if "$@" >"$log" 2>&1; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            cp "$log" "$work/$name.failed.$round.log"
            echo "FAIL  $name, round $round (first seed $first): $work/$name.failed.$round.log"
            tail -n 12 "$log" | sed 's/^/    /'
        fi
        round=$((round + 1))
    done
    echo "ok    $name: $round rounds"
}

# once NAME COMMAND...: runs a command once.
once() {
    local name=$1 log=$work/$1.log
    shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name: $log"
        tail -n 20 "$log" | sed 's/^/    /'
    fi
}

# Stores of up to 8 GiB, a small cgroup, and one store for a sixth of the time. This takes at most
# nine minutes, because the test runner kills a test after ten. shellcheck disable=SC2086
resident() {
    KVTIER_RESIDENT_SECONDS=$((seconds / 6 < 540 ? seconds / 6 : 540)) cargo nextest run --locked --workspace \
        $features --test store --run-ignored only -j 1 --no-capture -E 'test(resident::)'
}
# shellcheck disable=SC2086
swift() {
    "$here/swift.sh" "$work/swift" cargo nextest run --locked --workspace $features --test remote -E 'test(running_service_conforms)'
}
seeds() { "$target/debug/kvtier-sim" --first $((first + round * 500)) --seeds 500; }
# shellcheck disable=SC2086
kills() { KVTIER_CRASH_ROUNDS=50 cargo nextest run --locked --workspace $features --test store -E 'test(=crash::stored_cells_survive_a_killed_process)'; }
late() { "$here/late/run.sh" "$work/late" 1 "${programs[@]}"; }
# shellcheck disable=SC2086
cases() {
    PROPTEST_CASES=2000 KVTIER_WANDER_SEEDS=60 KVTIER_SIM_SEED=$((first + round)) \
        cargo nextest run --locked --workspace $features \
        -E 'test(random::) | test(concurrent_block_transfers) | test(under_concurrent_load) | test(models::) | test(cuda_wander::) | test(keep_all_invariants)'
}

cmake -S "$root" -B "$work/cmake" -G Ninja -DKVTIER_PREBUILT_DIR="$prebuilt" -DKVTIER_TESTS=ON \
    -DKVTIER_INSTALL=OFF -DCMAKE_BUILD_TYPE=Debug >"$work/cmake.log" &&
    cmake --build "$work/cmake" >>"$work/cmake.log" || { tail -n 20 "$work/cmake.log"; exit 1; }
mapfile -t programs < <(find "$work/cmake" -maxdepth 1 -type f -name 'kvtier_test_*' -perm -u+x | sort)
[ "${#programs[@]}" -gt 0 ] || { echo "no test programs in $work/cmake; see $work/cmake.log"; exit 1; }

if [ -e "$work/../llama/build/CTestTestfile.cmake" ]; then
    once llama ctest --test-dir "$work/../llama/build" -L long --output-on-failure
    once llama-old env KVTIER_ENGINE=old bindings/llama.cpp/test.sh "$prebuilt" "$work/../llama"
else
    echo "SKIP  llama: run the stage llama in this directory first"
fi

seconds=$((minutes * 60))
if command -v swift-proxy-server >/dev/null; then once swift swift; else echo "SKIP  swift: not installed"; fi
once resident resident
part seeds $((seconds / 3)) seeds
part kills $((seconds / 3)) kills
part late $((seconds / 6)) late
part cases $((seconds - 2 * (seconds / 3) - seconds / 6)) cases
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
