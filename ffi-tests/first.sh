#!/bin/bash
# Measures the times of a new contributor:  ffi-tests/first.sh [--dist] [WORKDIR]
#
# Works in a clean clone with fetched crates. It measures the first command up to the demo's table
# and its disk use, then the library and `cargo check` after a change in one policy file. It also
# starts a C program that is linked to target/release. With --dist it compares the demo with that of
# the shipped profile (link-time optimisation, some minutes more). Prints one line per result with
# its goal for two cores. Fails only if a command fails, never because of a time. Needs 3 GiB of
# disk under WORKDIR (default: a new directory in TMPDIR, removed at the end).
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

seconds() { # COMMAND...: runs the command silently, prints its time in seconds
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

# A program that is linked to the build must find the library at start.
cc -Iinclude ffi-tests/c/version.c -o "$work/linked" -Ltarget/release -lkvtier -Wl,-rpath,"$PWD/target/release"
"$work/linked" >/dev/null
row "a C program linked to target/release" "starts" "starts"

# A change that affects code generation.
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
