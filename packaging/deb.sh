#!/bin/bash
# Makes the Debian packages, for packaging/build.sh:  packaging/deb.sh BUILT WORK OUT
#
# BUILT is a folder of cmake/build.sh with the tool. WORK has man/*.1, THIRD-PARTY.txt, kvtier.cdx.json
# and deb/examples. Makes libkvtier0.1, libkvtier-dev and kvtier, without debhelper. KVTIER_DEB_OPTIONS
# are options of dpkg-deb, default -Zxz.
set -euo pipefail
built=${1:?usage: deb.sh BUILT WORK OUT} work=${2:?} out=${3:?}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
here=$root/packaging/debian
upstream=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
version=$upstream-1
case $upstream in 0.*) soversion=${upstream%.*} ;; *) soversion=${upstream%%.*} ;; esac
library=libkvtier$soversion
architecture=$(dpkg --print-architecture)
multiarch=$(dpkg-architecture -q DEB_HOST_MULTIARCH)
maintainer=${KVTIER_MAINTAINER:-kvtier maintainers <maintainers@kvtier.example>}
stage=$work/deb

# depends FILE...: the packages that have the libraries which the files need.
depends() {
    mkdir -p "$stage/shlibs/debian"
    printf 'Source: kvtier\n\nPackage: kvtier\nArchitecture: any\n' >"$stage/shlibs/debian/control"
    cd "$stage/shlibs"
    dpkg-shlibdeps -O "$@" 2>log >substvars || { cat log >&2 && exit 1; }
    sed -n 's/^shlibs:Depends=//p' substvars
}

# stanza PACKAGE DEPENDS: its control file.
stanza() {
    local kib
    # One KiB for each folder and link, as dpkg counts.
    kib=$(cd "$stage/$1" && find . -path ./DEBIAN -prune -o -type f -printf '%s\n' -o -printf '1\n' |
        awk '{ kib += int(($1 + 1023) / 1024) } END { print kib }')
    sed -e "s|@LIBRARY@|$library|" -e "s|@VERSION@|$version|" -e "s|@ARCHITECTURE@|$architecture|" \
        -e "s|@MAINTAINER@|$maintainer|" -e "s|@SIZE@|$kib|" -e "s|@DEPENDS@|$2|" "$here/control" |
        awk -v RS= -v package="$1" '$2 == package'
}

# documents PACKAGE: what policy wants under /usr/share/doc.
documents() {
    local doc=$stage/$1/usr/share/doc/$1
    install -d "$doc"
    sed -e "s|@PACKAGE@|$1|" "$here/copyright" >"$doc/copyright"
    printf 'kvtier (%s) unstable; urgency=medium\n\n  * Upstream release; changelog.gz lists its changes.\n\n -- %s  %s\n' \
        "$version" "$maintainer" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$doc/changelog.Debian.gz"
    gzip -9nc "$root/CHANGELOG.md" >"$doc/changelog.gz"
    gzip -9nc "$work/THIRD-PARTY.txt" >"$doc/THIRD-PARTY.gz"
}

# package PACKAGE DEPENDS: packs the folder of that name.
package() {
    local folder=$stage/$1
    documents "$1"
    install -d "$folder/DEBIAN"
    stanza "$1" "$2" >"$folder/DEBIAN/control"
    (cd "$folder" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$folder/DEBIAN/md5sums"
    find "$folder" -type d -exec chmod 755 {} +
    find "$folder" -type f -perm /111 -exec chmod 755 {} +
    find "$folder" -type f ! -perm /111 -exec chmod 644 {} +
    # dpkg-deb lowers later times to the epoch, and leaves earlier ones: all are set here.
    find "$folder" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    # shellcheck disable=SC2086
    dpkg-deb --root-owner-group ${KVTIER_DEB_OPTIONS:--Zxz} --build "$folder" "$out/$1_${version}_$architecture.deb"
}

DESTDIR='' "$root/cmake/install.sh" --prefix /usr --destdir "$stage/all" --libdir "lib/$multiarch" --from "$built"
cd "$stage"
from=all/usr/lib/$multiarch

lib=$library/usr/lib/$multiarch
install -d "$lib" "$library/DEBIAN"
mv "$from/libkvtier.so.$soversion" "$from/libkvtier.so.$upstream" "$lib/"
chmod 644 "$lib/libkvtier.so.$upstream"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$lib/libkvtier.so.$upstream"
echo "libkvtier $soversion $library (>= $upstream)" >"$library/DEBIAN/shlibs"
echo "activate-noawait ldconfig" >"$library/DEBIAN/triggers"
needs=$(depends "$stage/$lib/libkvtier.so.$upstream")
package "$library" "$needs"

dev=libkvtier-dev
install -d "$dev/usr/lib" "$dev/usr/share/doc/$dev"
mv "$from" "$dev/usr/lib/"
mv all/usr/include "$dev/usr/"
strip --strip-debug --enable-deterministic-archives --remove-section=.comment "$dev/usr/lib/$multiarch/libkvtier.a"
mv examples "$dev/usr/share/doc/$dev/"
package "$dev" "$library (= $version)"

install -d kvtier/usr/share/man/man1
mv all/usr/bin kvtier/usr/
strip --remove-section=.comment --remove-section=.note kvtier/usr/bin/kvtier
for page in "$work"/man/*.1; do gzip -9nc "$page" >"kvtier/usr/share/man/man1/$(basename "$page").gz"; done
needs=$(depends "$stage/kvtier/usr/bin/kvtier")
package kvtier "$needs"
