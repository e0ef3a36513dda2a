#!/bin/sh
# Builds the shared and the static library and lays them out under OUTDIR:
#
#   cmake/build.sh OUTDIR [PROFILE]      PROFILE: release (default), abi, dev
#
#   OUTDIR/lib/libkvtier.so.MAJOR.MINOR.PATCH   and the links to it
#   OUTDIR/lib/libkvtier.a
#
# One cargo call for each crate type: a call that makes both silently drops LTO.
# Honours CARGO, CARGO_TARGET_DIR, CARGO_BUILD_TARGET, CARGO_NET_OFFLINE and RUSTFLAGS.
set -eu
out=${1:?usage: cmake/build.sh OUTDIR [PROFILE]}
profile=${2:-release}
root=$(cd "$(dirname "$0")/.." && pwd)
cargo=${CARGO:-cargo}
mkdir -p "$out/lib"
out=$(cd "$out" && pwd)
cd "$root"

target_dir=${CARGO_TARGET_DIR:-$root/target}
case $profile in dev) sub=debug ;; *) sub=$profile ;; esac
artifacts=$target_dir/${CARGO_BUILD_TARGET:+$CARGO_BUILD_TARGET/}$sub

# Messages of caught panics carry source paths: not those of this machine.
sysroot=$(${RUSTC:-rustc} --print sysroot)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$root=kvtier --remap-path-prefix=$cargo_home=cargo --remap-path-prefix=$sysroot=rust"
export RUSTFLAGS

for type in cdylib staticlib; do
    "$cargo" rustc --locked --lib --no-default-features --profile "$profile" --crate-type $type
    case $type in
        cdylib) built=libkvtier.so ;;
        staticlib) built=libkvtier.a ;;
    esac
    cp "$artifacts/$built" "$out/lib/$built.new"
done

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
minor=${version%.*}
case $version in 0.*) soversion=$minor ;; *) soversion=${version%%.*} ;; esac
cd "$out/lib"
mv libkvtier.a.new libkvtier.a
mv libkvtier.so.new "libkvtier.so.$version"
chmod 755 "libkvtier.so.$version"
ln -sf "libkvtier.so.$version" "libkvtier.so.$soversion"
ln -sf "libkvtier.so.$soversion" libkvtier.so
