#!/bin/sh
# Installs what cmake/build.sh built, without CMake:
#
#   cmake/install.sh --prefix P [--destdir D] [--libdir lib] [--from OUTDIR]
#
# P is where it will be found; D is put before it (also taken from DESTDIR). --libdir is
# relative to the prefix. Without --from it builds first. Everything installed finds its
# neighbours from its own place, so the prefix can be moved afterwards.
# `cmake --install` runs this script too: there is one layout, in one place.
set -eu
prefix='' destdir=${DESTDIR:-} libdir=lib from=''
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) prefix=${2:?} ;;
        --destdir) destdir=${2-} ;;
        --libdir) libdir=${2:?} ;;
        --from) from=${2:?} ;;
        *) echo "install.sh: unknown argument $1" >&2; exit 2 ;;
    esac
    shift 2
done
[ -n "$prefix" ] || { echo "usage: install.sh --prefix P [--destdir D] [--libdir L] [--from OUTDIR]" >&2; exit 2; }
case $prefix in /*) ;; *) prefix=$(pwd)/$prefix ;; esac
case $destdir in '' | /*) ;; *) destdir=$(pwd)/$destdir ;; esac
case $libdir in /*) echo "install.sh: --libdir is relative to the prefix" >&2; exit 2 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")

if [ -z "$from" ]; then
    from=${CARGO_TARGET_DIR:-$root/target}/kvtier-install
    "$here/build.sh" "$from"
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
case $version in 0.*) soversion=${version%.*} ;; *) soversion=${version%%.*} ;; esac
static_libs=$(cat "$here/static-libs.txt")
to=$destdir${prefix%/}
lib=$to/$libdir

# From DIR (relative to the prefix) back to the prefix, such as ../..
up() { echo "$1" | sed 's:/*$::; s:[^/][^/]*:..:g'; }

install -d "$lib/pkgconfig" "$lib/cmake/kvtier" "$to/include/kvtier"
install -m 755 "$from/lib/libkvtier.so.$version" "$lib/"
ln -sf "libkvtier.so.$version" "$lib/libkvtier.so.$soversion"
ln -sf "libkvtier.so.$soversion" "$lib/libkvtier.so"
install -m 644 "$from/lib/libkvtier.a" "$lib/"
install -m 644 "$root"/include/kvtier/*.h "$root"/bindings/cpp/*.hpp "$to/include/kvtier/"
if [ -e "$from/bin/kvtier" ]; then
    install -d "$to/bin"
    install -m 755 "$from/bin/kvtier" "$to/bin/"
fi

fill() {
    sed -e "s|@VERSION@|$version|g" -e "s|@SOVERSION@|$soversion|g" -e "s|@LIBDIR@|$libdir|g" \
        -e "s|@STATIC_LIBS@|$static_libs|g" \
        -e "s|@STATIC_LIBS_LIST@|$(echo "$static_libs" | tr ' ' ';')|g" \
        -e "s|@UP_FROM_PC@|$(up "$libdir/pkgconfig")|g" \
        -e "s|@UP_FROM_CMAKE@|$(up "$libdir/cmake/kvtier")|g" "$1" >"$2"
    chmod 644 "$2"
}
fill "$here/kvtier.pc.in" "$lib/pkgconfig/kvtier.pc"
fill "$here/kvtier-config.cmake.in" "$lib/cmake/kvtier/kvtierConfig.cmake"
fill "$here/kvtier-config-version.cmake.in" "$lib/cmake/kvtier/kvtierConfigVersion.cmake"
