#!/bin/sh
# Compares the binary interface with the committed one, and proves that it would see
# a break.
#
#   ffi-tests/abi/abidiff.sh WORKDIR [--bless]   --bless renews kvtier.abi.xz
#
# The dump comes from a build with debug info: without it abidiff compares nothing
# and says yes, so a dump without types is refused.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "${1:?usage: abidiff.sh WORKDIR [--bless]}"
work=$(cd "$1" && pwd)
bless=${2:-}
baseline=$here/kvtier.abi.xz
for tool in abidw abidiff xz; do
    command -v "$tool" >/dev/null || { echo "SKIP: $tool is not here"; exit 77; }
done
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
KVTIER_CRATE_TYPES=cdylib
export CARGO_TARGET_DIR KVTIER_CRATE_TYPES

# dump TREE OUTDIR XML: the interface of the library in OUTDIR, as TREE's header shows it.
dump() {
    so=$(readlink -f "$2/lib/libkvtier.so")
    abidw --headers-dir "$1/include" --drop-private-types --no-corpus-path --no-comp-dir-path \
        --no-show-locs --no-parameter-names --no-elf-needed --type-id-style hash \
        "$so" --out-file "$3"
}

# A dump with functions and types, or none at all.
proven() {
    for part in "name='kvt_runtime_open'" "name='kvt_runtime_opts_t'" "name='struct_size'" \
        "name='workers'" "name='faults_bytes'"; do
        grep -qF "$part" "$1" || { echo "the dump has no $part"; return 1; }
    done
}

# Both builds are of a copy in one place, so that the second only compiles what the breaks change.
tree=$work/tree
rm -rf "$tree"
mkdir -p "$tree"
(cd "$root" && tar -cf - Cargo.toml Cargo.lock build.rs cmake include src crates) | (cd "$tree" && tar -xf -)
# An earlier run broke these: cargo sees a change by its time.
touch "$tree/src/ffi/memory.rs" "$tree/src/ffi/base.rs"

# built OUTDIR: the tree as it is, laid out there.
built() {
    "$tree/cmake/build.sh" "$1" abi >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; exit 1; }
}
built "$work/now"
dump "$tree" "$work/now" "$work/now.abi"
proven "$work/now.abi"
echo "ok    the dump has functions, structs and members"
for path in "$root" "$work" "${HOME:-/nowhere}"; do
    [ "$path" = / ] && continue
    if grep -qF "$path/" "$work/now.abi"; then echo "FAIL  the dump names $path"; exit 1; fi
done

cp "$(readlink -f "$work/now/lib/libkvtier.so")" "$work/stripped.so"
strip --strip-all "$work/stripped.so"
abidw --headers-dir "$root/include" --no-corpus-path "$work/stripped.so" \
    --out-file "$work/stripped.abi" 2>/dev/null || true
if proven "$work/stripped.abi" >/dev/null; then
    echo "FAIL  a stripped library was taken for one with types"
    exit 1
fi
echo "ok    a stripped library is refused: its dump has no types"

if [ "$bless" = --bless ]; then
    xz -9e -c "$work/now.abi" >"$baseline"
fi
xz -dc "$baseline" >"$work/committed.abi"
proven "$work/committed.abi"
compare() { abidiff --no-show-locs "$1" "$2" >"$work/report" 2>&1; }
if ! compare "$work/committed.abi" "$work/now.abi"; then
    cat "$work/report"
    echo "FAIL  the interface is not the committed one (--bless renews it)"
    exit 1
fi
echo "ok    the interface is the committed one"

# Breaks in the tree: each must be reported. One build covers both; the report tells them apart.
# break NAME SED-SCRIPT FILE
break_() {
    cp "$tree/$3" "$work/before"
    sed -i "$2" "$tree/$3"
    if cmp -s "$work/before" "$tree/$3"; then echo "FAIL  $1: the edit missed $3"; exit 1; fi
}
# The new field goes before `waiting`; the literal in the same crate gets it, too.
break_ "a field in the middle of a struct" \
    's/^    pub waiting: u64,$/    pub planted: u64,\n    pub waiting: u64,/; s/^\( *\)waiting: [a-z]*.waiting,$/\1planted: 0,\n\1waiting: usage.waiting,/' \
    src/ffi/memory.rs
break_ "a removed function" 's/^pub extern "C" fn kvt_version_str/pub extern "C" fn kvt_version_text/' \
    src/ffi/base.rs
built "$work/broken"
dump "$tree" "$work/broken" "$work/broken.abi"
if compare "$work/committed.abi" "$work/broken.abi"; then
    echo "FAIL  breaks were not seen"
    exit 1
fi
# seen NAME PATTERN
seen() {
    grep -q "$2" "$work/report" || { cat "$work/report"; echo "FAIL  $1 was not seen"; exit 1; }
    echo "ok    $1 is seen"
}
seen "a field in the middle of a struct" "planted.*at offset"
seen "a removed function" "\[D\].*kvt_version_str"
echo "5 passed, 0 failed; the baseline has $(stat -c %s "$baseline") bytes"
