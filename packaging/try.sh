#!/bin/bash
# Tries the packages in a bare Debian 12:  packaging/try.sh OUT WORK [KIND...]
#
# OUT is what packaging/build.sh made. For each KIND (deb, tarball, wheel, source; default: all) a new
# root folder under WORK gets a minimal Debian and what docs/howto/install.md asks for. The package is
# installed there, and programs are compiled, linked and run without network. Needs root and 3 GiB
# under WORK; installs debootstrap. KVTIER_TRY_PROFILE is the cargo profile of the source build: dev
# (default) or dist. KVTIER_DEBIAN_MIRROR names another mirror. Prints `ok KIND` or `FAIL KIND`; logs
# stay in WORK/log. Nothing is mounted outside of the tries' own namespaces.
# shellcheck disable=SC2016 # the commands of a try expand inside
set -euo pipefail
out=$(cd "${1:?usage: try.sh OUT WORK [KIND...]}" && pwd)
mkdir -p "${2:?usage: try.sh OUT WORK [KIND...]}" && work=$(cd "$2" && pwd)
shift 2
all="deb tarball wheel source"
kinds=${*:-$all}
for kind in $kinds; do
    case " $all " in *" $kind "*) ;; *) echo "no kind '$kind'; there are: $all" >&2 && exit 2 ;; esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
profile=${KVTIER_TRY_PROFILE:-dev}
if [ "$(id -u)" -ne 0 ] || ! unshare --mount --net --pid --fork true; then
    echo "SKIP: needs root and namespaces"
    exit 77
fi
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
if ! command -v debootstrap >/dev/null; then
    apt-get update -q
    apt-get install -q -y --no-install-recommends debootstrap
fi
mkdir -p "$work/log"

# A base that is complete is kept: its roots are copies.
if [ ! -e "$work/base.complete" ]; then
    rm -rf --one-file-system "$work/base"
    # shellcheck disable=SC2086
    debootstrap --variant=minbase --include=ca-certificates bookworm "$work/base" ${KVTIER_DEBIAN_MIRROR:-} \
        >"$work/log/debootstrap" || { tail -n 5 "$work/log/debootstrap"; exit 1; }
    # Rust comes with security updates.
    sed -i 's|^deb \(\S*\) bookworm main$|&\ndeb \1-security bookworm-security main|' "$work/base/etc/apt/sources.list"
    touch "$work/base.complete"
fi

# inside ROOT NET COMMAND: runs a command there; NET is --net for none.
inside() {
    # shellcheck disable=SC2016,SC2086
    unshare --mount --pid --fork $2 sh -ec '
        mount --make-rprivate /
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/tmp"
        exec chroot "$1" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C \
            DEBIAN_FRONTEND=noninteractive VERSION="$3" PROFILE="$4" sh -exc "$2"' \
        inside "$1" "$3" "$version" "$profile"
}
online() { inside "$1" "" "apt-get update -q; apt-get install -q -y --no-install-recommends $2"; }
offline() { inside "$1" --net "$2"; }

c_tools="gcc libc6-dev pkg-config"
# The commands of each try. A line ends at its first failure: no `&&`, which would hide it.
deb() {
    # Runtime and tool first: they need nothing that a bare system lacks.
    offline "$1" 'dpkg -i /packages/libkvtier0*.deb /packages/kvtier_*.deb
        kvtier --version; kvtier fsck --help >/dev/null; test -s /usr/share/man/man1/kvtier.1.gz
        ldconfig -p | grep "libkvtier.so.${VERSION%.*} "'
    online "$1" "$c_tools cmake make g++"
    offline "$1" 'dpkg -i /packages/libkvtier-dev_*.deb
        cd /tmp; cp -r /usr/share/doc/libkvtier-dev/examples/c /consumer .
        cc c/hello_kv.c $(pkg-config --cflags --libs kvtier) -o shared; ./shared
        cc c/hello_kv.c /usr/lib/*/libkvtier.a -lm -lpthread -ldl -lgcc_s -o static; ./static
        if ldd static | grep libkvtier; then exit 1; fi
        cmake -S consumer -B cmake; cmake --build cmake; cmake/consumer_c; cmake/consumer_cpp
        test -z "$(dpkg --verify libkvtier0.1 libkvtier-dev kvtier)"
        dpkg --purge kvtier libkvtier-dev libkvtier0.1
        test -z "$(find /usr -name "*kvtier*")"
        if ldconfig -p | grep kvtier; then exit 1; fi'
}
tarball() {
    online "$1" "$c_tools cmake make g++"
    offline "$1" 'mkdir /opt/some; tar -xzf /packages/kvtier-*-linux-*.tar.gz -C /opt/some
        mv /opt/some/kvtier-* /opt/kvtier
        cd /opt/kvtier; bin/kvtier --version; export PKG_CONFIG_PATH=$PWD/lib/pkgconfig
        cc examples/c/hello_kv.c $(pkg-config --cflags --libs kvtier) -Wl,-rpath,"$PWD/lib" -o /tmp/shared; /tmp/shared
        cc examples/c/hello_kv.c -Iinclude lib/libkvtier.a -lm -lpthread -ldl -lgcc_s -o /tmp/static; /tmp/static
        cmake -DCMAKE_PREFIX_PATH=/opt/kvtier -S /consumer -B /tmp/cmake; cmake --build /tmp/cmake
        /tmp/cmake/consumer_c; /tmp/cmake/consumer_cpp'
}
wheel() {
    online "$1" "python3 python3-venv"
    offline "$1" 'python3 -m venv /venv; /venv/bin/pip install --no-index /packages/kvtier-*.whl; /venv/bin/pip check
        cd /tmp; /venv/bin/python /put_get.py; /venv/bin/pip uninstall -y kvtier'
}
source_() {
    online "$1" "$c_tools cargo-web rustc-web"
    offline "$1" 'cd /opt; tar -xzf /packages/kvtier-*-vendored.tar.gz; cd kvtier-"$VERSION"
        export CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 KVTIER_TOOL=1
        cmake/build.sh /opt/built "$PROFILE"; cmake/install.sh --prefix /usr/local --from /opt/built; ldconfig
        kvtier --version; test -z "$(find "$HOME" -name "*.crate")"
        cc examples/c/hello_kv.c $(pkg-config --cflags --libs kvtier) -o /tmp/shared; /tmp/shared
        cc examples/c/hello_kv.c /usr/local/lib/libkvtier.a -lm -lpthread -ldl -lgcc_s -o /tmp/static; /tmp/static'
}

passed=0 failed=0
for kind in $kinds; do
    place=$work/root-$kind begun=$SECONDS rc=0
    rm -rf --one-file-system "$place"
    cp -a --reflink=auto "$work/base" "$place"
    mkdir "$place/packages"
    find "$out" -maxdepth 1 -type f -exec cp -t "$place/packages" {} +
    cp -r "$root/ffi-tests/consumer" "$root/packaging/put_get.py" "$place/"
    command=$kind
    [ "$kind" != source ] || command=source_
    set +e
    (set -e; "$command" "$place") >"$work/log/$kind" 2>&1
    rc=$?
    set -e
    if [ $rc -eq 0 ]; then
        echo "ok    $kind ($((SECONDS - begun)) s)"
        passed=$((passed + 1))
        rm -rf --one-file-system "$place"
    else
        echo "FAIL  $kind: $work/log/$kind"
        tail -n 15 "$work/log/$kind" | sed 's/^/    /'
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
