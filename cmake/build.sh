#!/bin/sh
# Builds the shared and the static library and lays them out under OUTDIR:
#
#   cmake/build.sh OUTDIR [PROFILE]      PROFILE: dist (default), release, abi, dev
#
#   OUTDIR/lib/libkvtier.so.MAJOR.MINOR.PATCH   and the links to it
#   OUTDIR/lib/libkvtier.a
#   OUTDIR/bin/kvtier                            the tool, with KVTIER_TOOL=1
#
# KVTIER_FEATURES (default: redis,dir) names the cargo features: also tls, seal, s3.
#
# Cargo makes the archive, and the shared object is linked from it: a call that makes both
# silently drops LTO, and two calls would optimise the whole program twice.
# Honours CARGO, CARGO_TARGET_DIR, CARGO_BUILD_TARGET, CARGO_NET_OFFLINE, RUSTFLAGS, CC, LD,
# OBJCOPY and AR. KVTIER_CARGO_ARGS is passed to cargo (cmake/vendor.sh prints some).
# KVTIER_PLAIN_ARCHIVE=1 leaves the archive as rustc makes it; KVTIER_CRATE_TYPES=cdylib
# makes no archive: cargo links the shared object.
set -eu
out=${1:?usage: cmake/build.sh OUTDIR [PROFILE]}
profile=${2:-dist}
mkdir -p "$out/lib"
out=$(cd "$out" && pwd)
# The target directory is the caller's: relative to where it was called.
case ${CARGO_TARGET_DIR:-} in '' | /*) ;; *) CARGO_TARGET_DIR=$(pwd)/$CARGO_TARGET_DIR ;; esac
root=$(cd "$(dirname "$0")/.." && pwd -P)
cargo=${CARGO:-cargo}
cd "$root"

target_dir=${CARGO_TARGET_DIR:-$root/target}
export CARGO_TARGET_DIR="$target_dir"
case $profile in dev) sub=debug ;; *) sub=$profile ;; esac
artifacts=$target_dir/${CARGO_BUILD_TARGET:+$CARGO_BUILD_TARGET/}$sub

# Messages of caught panics carry source paths: not those of this machine.
sysroot=$(${RUSTC:-rustc} --print sysroot)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
remap="--remap-path-prefix=$root=kvtier --remap-path-prefix=$cargo_home=cargo"
remap="$remap --remap-path-prefix=$sysroot=rust --remap-path-prefix=$target_dir=target"
if [ -n "${KVTIER_VENDOR_DIR:-}" ]; then
    remap="$remap --remap-path-prefix=$KVTIER_VENDOR_DIR=vendor"
fi
RUSTFLAGS="${RUSTFLAGS:+$RUSTFLAGS }$remap"
export RUSTFLAGS

# Makes the archive one object in which only kvt_* is visible, so that it can be linked
# beside another Rust static library: their copies of the standard library would clash,
# and so would their COMDAT groups, which are dissolved.
# Embedded bitcode goes: once merged, tools that read it stumble over it.
seal() {
    whole=$1.whole.o
    one=$(dirname "$1")/kvtier.o
    "${LD:-ld}" -r --force-group-allocation --whole-archive "$1" -o "$whole"
    "${OBJCOPY:-objcopy}" --wildcard --keep-global-symbol='kvt_*' --strip-debug \
        --remove-section=.llvmbc --remove-section=.llvmcmd "$whole" "$one"
    rm -f "$1" "$whole"
    "${AR:-ar}" crsD "$1" "$one"
    rm -f "$one"
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
minor=${version%.*}
case $version in 0.*) soversion=$minor ;; *) soversion=${version%%.*} ;; esac

# Links the shared object SO from ARCHIVE, with the arguments that build.rs gives to cargo's.
share() {
    printf '{ global: kvt_*; local: *; };\n' >"$2.map"
    # shellcheck disable=SC2046
    "${CC:-cc}" -shared -o "$2" -Wl,--whole-archive "$1" -Wl,--no-whole-archive \
        -Wl,--version-script="$2.map" -Wl,--gc-sections -Wl,-O1 -Wl,--strip-debug \
        -Wl,-soname,"libkvtier.so.$soversion" -Wl,-z,nodelete -Wl,-z,relro,-z,now -Wl,-z,noexecstack \
        -Wl,--as-needed $(cat cmake/static-libs.txt)
    rm -f "$2.map"
}

types=${KVTIER_CRATE_TYPES:-staticlib}
features=${KVTIER_FEATURES-redis,dir}
# shellcheck disable=SC2086
"$cargo" rustc --locked --package kvtier --lib --no-default-features --features "$features" --profile "$profile" \
    --crate-type "$types" ${KVTIER_CARGO_ARGS:-}
case $types in
    cdylib) cp "$artifacts/libkvtier.so" "$out/lib/libkvtier.so.new" ;;
    *)
        cp "$artifacts/libkvtier.a" "$out/lib/libkvtier.a.new"
        share "$out/lib/libkvtier.a.new" "$out/lib/libkvtier.so.new"
        [ -n "${KVTIER_PLAIN_ARCHIVE:-}" ] || seal "$out/lib/libkvtier.a.new"
        ;;
esac

# After the libraries are copied: cargo makes the library again for the tool, in its place.
if [ -n "${KVTIER_TOOL:-}" ]; then
    # shellcheck disable=SC2086
    "$cargo" build --locked --package kvtier-cli --bin kvtier --no-default-features --features "$features" \
        --profile "$profile" ${KVTIER_CARGO_ARGS:-}
    mkdir -p "$out/bin"
    cp "$artifacts/kvtier" "$out/bin/kvtier.new"
fi

cd "$out/lib"
# An unchanged file keeps its time, so that nothing is linked again for it.
place() {
    if cmp -s "$1" "$2"; then rm -f "$1"; else chmod "$3" "$1" && mv -f "$1" "$2"; fi
}
case $types in *staticlib*) place libkvtier.a.new libkvtier.a 644 ;; esac
place libkvtier.so.new "libkvtier.so.$version" 755
ln -sf "libkvtier.so.$version" "libkvtier.so.$soversion"
ln -sf "libkvtier.so.$soversion" libkvtier.so
if [ -n "${KVTIER_TOOL:-}" ]; then
    cd "$out/bin"
    place kvtier.new kvtier 755
fi
