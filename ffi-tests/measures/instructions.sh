#!/usr/bin/env bash
# Instructions, locked operations and allocations of a cell that is put or got, counted by
# valgrind. The counts do not depend on the speed of the machine or on other work.
#
#   instructions.sh [--store] [--policies lru,horizon] [BAR...]
#
# BAR is a name that `kvtier-bench count` lists; default: all. By default only the tables are
# counted, whose copies take no time. --store counts a whole store with its lock, ops and copy
# thread, where the threads' waiting varies by some percent. Prints one JSON object per line.
# BENCH names the program; otherwise a release build is made.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
policies=lru,horizon store=() bars=()
while [ $# -gt 0 ]; do
    case $1 in
    --store) store=(--store) ;;
    --policies) policies=$2; shift ;;
    -*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *) bars+=("$1") ;;
    esac
    shift
done
command -v valgrind >/dev/null || { echo "SKIP: install valgrind" >&2; exit 0; }
if [ -z "${BENCH:-}" ]; then
    (cd "$root" && cargo build --release -q -p kvtier-bench)
    BENCH=${CARGO_TARGET_DIR:-$root/target}/release/kvtier-bench
fi
[ ${#bars[@]} -gt 0 ] || mapfile -t bars < <("$BENCH" count)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Prints "INSTRUCTIONS LOCKED CELLS ALLOCATIONS" of a run with some sessions.
counted() {
    local only=()
    # Of a whole store two runs are subtracted, since work moves to other threads.
    [ ${#store[@]} -gt 0 ] || only=(--toggle-collect='*kvtier_counted*')
    valgrind --tool=callgrind --collect-bus=yes --callgrind-out-file="$work/out" "${only[@]}" \
        "$BENCH" count "$1" --policy "$2" --sessions "$3" "${store[@]}" >"$work/line" 2>"$work/log" ||
        { cat "$work/log" >&2; return 1; }
    python3 - "$work" <<'PYTHON'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
line = json.loads((work / "line").read_text())
summary = dict(one.split(": ", 1) for one in (work / "out").read_text().splitlines()
               if one.startswith(("events: ", "totals: ")))
counts = dict(zip(summary["events"].split(), map(int, summary["totals"].split())))
print(counts["Ir"], counts.get("Ge", 0), line["cells"], line["allocations"])
PYTHON
}

for bar in "${bars[@]}"; do
    for policy in ${policies//,/ }; do
        few="0 0 0 0"
        [ ${#store[@]} -eq 0 ] || few=$(counted "$bar" "$policy" 20)
        many=$(counted "$bar" "$policy" 40)
        python3 - "$bar" "$policy" "${store[*]:-}" $few $many <<'PYTHON'
import json, sys
bar, policy, store = sys.argv[1:4]
few, many = [int(x) for x in sys.argv[4:8]], [int(x) for x in sys.argv[8:]]
instructions, locked, cells, allocations = (b - a for a, b in zip(few, many))
# The benchmark counts allocations, each by one locked operation.
print(json.dumps({"group": "count", "bar": bar, "policy": policy,
                  "counted": "store" if store else "tables", "cells": cells,
                  "instructions": round(instructions / cells, 1),
                  "locked": round((locked - allocations) / cells, 2),
                  "allocations": round(allocations / cells, 2)}), flush=True)
PYTHON
    done
done
