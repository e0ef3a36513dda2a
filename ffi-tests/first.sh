#!/bin/bash
# What a newcomer waits for, measured:  ffi-tests/first.sh [--dist] [WORKDIR]
#
# In a clean clone, with crates fetched: the first command to the demo's table and the disk it takes;
# the library, and `cargo check`, after a change in one policy file; a C program that is linked to
# target/release and starts. With --dist also the demo beside that of the shipped profile (whole-program
# optimisation: some minutes more). Prints a bar a line, beside its goal for two cores, and fails only
# where something does not work: time is no test. Needs 3 GiB of disk under WORKDIR (a new
# directory in TMPDIR, which is removed at the end).
set -euo pipefail
dist=""
if [ "${1:-}" = --dist ]; then dist=yes && shift; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1" && work=$(cd "$1" && pwd)
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
unset CARGO_TARGET_DIR CARGO_INCREMENTAL RUSTFLAGS
rm -rf "$work/clone"
git clone -q "$root" "$work/clone"
cd "$work/clone"
cargo fetch --locked --quiet

seconds() { # COMMAND...: runs it quietly, prints how long that took
    local begin end
    begin=$(date +%s%N)
    "$@" >"$work/out" 2>&1 || { tail -n 20 "$work/out" >&2; return 1; }
    end=$(date +%s%N)
    awk "BEGIN { printf \"%.1f\", ($end - $begin) / 1e9 }"
}
row() { printf '%-44s %10s   %s\n' "$1" "$2" "$3"; }

echo "$(nproc) cores, $(cargo --version)"
row "what" "measured" "goal on two cores"
first=$(seconds cargo run --locked --release -- demo)
row "cargo run --release -- demo, seconds" "$first" "<= 100"
row "its disk, MiB" "$(du -sm target | cut -f1)" "<= 2048"
row "the demo alone, seconds" "$(seconds target/release/kvtier demo)" "within 10 % of the dist build's"

# A program that is linked to the build finds the library when it starts.
cc -Iinclude ffi-tests/c/version.c -o "$work/linked" -Ltarget/release -lkvtier -Wl,-rpath,"$PWD/target/release"
"$work/linked" >/dev/null
row "a C program linked to target/release" "starts" "starts"

# A change that code generation sees.
seconds cargo build --locked --release -p kvtier --lib >/dev/null
cat >>src/policy/lru.rs <<'END'

/// A change.
pub fn changed(number: u64) -> u64 {
    number.rotate_left(7) ^ std::env::args().count() as u64
}
END
row "the library after a change in one policy, s" "$(seconds cargo build --locked --release -p kvtier --lib)" "<= 25"
seconds cargo check --locked -p kvtier >/dev/null
sed -i 's/rotate_left(7)/rotate_left(9)/' src/policy/lru.rs
row "cargo check after a change in one policy, s" "$(seconds cargo check --locked -p kvtier)" "<= 5"
git checkout -q src/policy/lru.rs

if [ -n "$dist" ]; then
    seconds cargo build --locked --profile dist -p kvtier-cli >/dev/null
    ratios=$(for _ in 1 2 3 4 5; do
        ours=$(seconds target/release/kvtier demo) shipped=$(seconds target/dist/kvtier demo)
        awk "BEGIN { print $ours / $shipped }"
    done | sort -n | sed -n 3p)
    row "the demo over that of dist, median of 5 pairs" "$ratios" "<= 1.10"
fi
