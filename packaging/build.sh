#!/bin/bash
# Builds the packages of kvtier:  packaging/build.sh OUT [KIND...]
#
#   source    kvtier-VERSION-vendored.tar.gz         sources with all crates; builds without network
#   tarball   kvtier-VERSION-linux-MACHINE.tar.gz    libraries, headers, tool; can be unpacked anywhere
#   deb       libkvtier*.deb, libkvtier-dev*.deb, kvtier*.deb
#   wheel     kvtier-VERSION-py3-none-manylinux*.whl the Python package with the library
#   cargo     kvtier-VERSION.crate, kvtier-macros-VERSION.crate
#   sbom      kvtier-VERSION.cdx.json (library), kvtier-cli-VERSION.cdx.json (tool): CycloneDX 1.5
#
# Default: all of them. OUT/SHA256SUMS lists what lies in OUT. Equal sources and toolchains give equal
# bytes, wherever and whenever they are built: times are SOURCE_DATE_EPOCH, which defaults to the last
# commit, and without git to the time of Cargo.toml.
#
#   KVTIER_PREBUILT_DIR  take libraries and tool from there (cmake/build.sh with KVTIER_TOOL=1)
#   KVTIER_FEATURES      cargo features, default redis,dir
#   KVTIER_MAINTAINER    maintainer of the Debian packages, as NAME <ADDRESS>
#
# Also honours what cmake/build.sh names. Installs the tools it needs (Debian's packages, as root).
set -euo pipefail

all="source tarball deb wheel cargo sbom"
usage() { sed -n '2,/^set -/p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p'; }
case ${1:-} in
    -h | --help) usage && exit 0 ;;
    '' | -*) usage >&2 && exit 2 ;;
esac
mkdir -p "$1" && out=$(cd "$1" && pwd)
shift
kinds=${*:-$all}
for kind in $kinds; do
    case " $all " in *" $kind "*) ;; *) echo "no kind '$kind'; there are: $all" >&2 && exit 2 ;; esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
case ${CARGO_TARGET_DIR:-} in '' | /*) ;; *) CARGO_TARGET_DIR=$PWD/$CARGO_TARGET_DIR ;; esac
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
cd "$root"
umask 022
export LC_ALL=C TZ=UTC PYTHONDONTWRITEBYTECODE=1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$(uname -m)
export KVTIER_FEATURES=${KVTIER_FEATURES-redis,dir}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wants() { case " $kinds " in *" $1 "*) ;; *) return 1 ;; esac; }
# A checkout of another user is taken, too.
git_() { git -c safe.directory="$root" "$@"; }
if [ -e .git ]; then is_checkout=yes; else is_checkout=""; fi

tools() {
    local want=() package
    local packages=(binutils gcc libc6-dev python3)
    if [ -n "$is_checkout" ]; then packages+=(git ca-certificates); fi
    if wants deb; then packages+=(dpkg-dev xz-utils); fi
    command -v apt-get >/dev/null || return 0
    for package in "${packages[@]}"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || want+=("$package")
    done
    command -v "${CARGO:-cargo}" >/dev/null || want+=(rustc-web cargo-web)
    if [ ${#want[@]} -gt 0 ]; then
        apt-get update -q >&2
        apt-get install -q -y --no-install-recommends "${want[@]}" >&2
    fi
}

# pack FOLDER ARCHIVE: an archive whose bytes depend on names and contents only.
pack() {
    tar -C "$(dirname "$1")" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner \
        --mode=u+rw,go+r,go-w,a+X --mtime="@$SOURCE_DATE_EPOCH" -cf - "$(basename "$1")" | gzip -9n >"$2"
}

# tracked TO [PATH...]: copies the files that belong to the sources.
tracked() {
    local to=$1
    shift
    mkdir -p "$to"
    if [ -n "$is_checkout" ]; then
        git_ ls-files -z -- "$@" | tar --null --no-recursion -T - -cf - | tar -C "$to" -xf -
    else
        tar -cf - -- "$@" | tar -C "$to" -xf -
    fi
}

# Crates that no Linux build uses are reduced to their manifest, which cargo reads all the same.
reduce() {
    local crate used
    used=" $(cargo tree --workspace --all-features --locked --edges all --target x86_64-unknown-linux-gnu \
        --target aarch64-unknown-linux-gnu --prefix none --format '{p}' |
        awk '{ print $1 "-" substr($2, 2) }' | sort -u | tr '\n' ' ')"
    for crate in "$1"/*; do
        case $used in *" $(basename "$crate") "*) continue ;; esac
        find "$crate" -mindepth 1 -maxdepth 1 ! -name Cargo.toml ! -name .cargo-checksum.json -exec rm -rf {} +
        mkdir "$crate/src"
        : >"$crate/src/lib.rs"
        sed -i 's/"files":{[^}]*}/"files":{}/' "$crate/.cargo-checksum.json"
    done
}

source_() {
    local stage=$work/source/kvtier-$version
    [ -n "$is_checkout" ] || { echo "build.sh: the kind 'source' needs a git checkout" >&2 && return 1; }
    tracked "$stage" .
    cmake/vendor.sh "$stage/vendor"
    reduce "$stage/vendor"
    mkdir -p "$stage/.cargo"
    cat >"$stage/.cargo/config.toml" <<'TOML'
# All crates lie in vendor/: builds need no network.
[source.crates-io]
replace-with = "vendored"
[source.vendored]
directory = "vendor"
TOML
    pack "$stage" "$out/kvtier-$version-vendored.tar.gz"
}

built=${KVTIER_PREBUILT_DIR:-}
# libraries: builds them, once.
libraries() {
    if [ -z "$built" ]; then
        built=$CARGO_TARGET_DIR/kvtier-packages
        KVTIER_TOOL=1 cmake/build.sh "$built"
    fi
    built=$(cd "$built" && pwd)
    bills
    "$built/bin/kvtier" man "$work/man"
}

# bills: the contents and licences of what is linked, for all packages; once.
bills() {
    local target=${CARGO_BUILD_TARGET:-$machine-unknown-linux-gnu}
    [ ! -e "$work/kvtier.cdx.json" ] || return 0
    # The tool contains the library, so its licences are those of both.
    packaging/sbom.py kvtier-cli --features "$KVTIER_FEATURES" --target "$target" \
        --out "$work/kvtier-cli.cdx.json" --licences "$work/THIRD-PARTY.txt"
    packaging/sbom.py kvtier --features "$KVTIER_FEATURES" --target "$target" --out "$work/kvtier.cdx.json"
}

tarball() {
    local stage=$work/tarball/kvtier-$version-linux-$machine
    libraries
    DESTDIR='' cmake/install.sh --prefix "$stage" --from "$built"
    install -d "$stage/share/man/man1"
    install -m 644 "$work"/man/*.1 "$stage/share/man/man1/"
    tracked "$stage" examples LICENSE CHANGELOG.md
    cp packaging/tarball.md "$stage/README.md"
    cp "$work/THIRD-PARTY.txt" "$work/kvtier.cdx.json" "$stage/"
    pack "$stage" "$out/kvtier-$version-linux-$machine.tar.gz"
}

deb() {
    libraries
    tracked "$work/deb" examples
    packaging/deb.sh "$built" "$work" "$out"
}

wheel() {
    libraries
    python3 bindings/python/build_wheel.py --prebuilt "$built" --out "$out" \
        --licences "$work/THIRD-PARTY.txt" --sbom "$work/kvtier.cdx.json"
}

cargo_() {
    # The macros first: the library depends on them. Cargo compiles what it has packed.
    cargo package --locked --allow-dirty --package kvtier-macros --package kvtier
    cp "$CARGO_TARGET_DIR/package"/kvtier{,-macros}-"$version".crate "$out/"
}

sbom() {
    bills
    cp "$work/kvtier.cdx.json" "$out/kvtier-$version.cdx.json"
    cp "$work/kvtier-cli.cdx.json" "$out/kvtier-cli-$version.cdx.json"
}

tools
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    if [ -n "$is_checkout" ]; then
        SOURCE_DATE_EPOCH=$(git_ log -1 --format=%ct)
    else
        SOURCE_DATE_EPOCH=$(stat -c %Y Cargo.toml)
    fi
fi
export SOURCE_DATE_EPOCH
for kind in $kinds; do
    echo "--- $kind"
    case $kind in source | cargo) "${kind}_" ;; *) "$kind" ;; esac
done
cd "$out"
rm -f SHA256SUMS
sha256sum -- * >"$work/sums"
cp "$work/sums" SHA256SUMS
cat SHA256SUMS
