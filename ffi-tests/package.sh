#!/bin/bash
# Tests every way in which kvtier is packaged:  ffi-tests/package.sh [--all] WORKDIR
#
# Prints `ok NAME` or `FAIL NAME` for each test, and `N passed, M failed` at the end. The logs stay
# in WORKDIR/log. Builds once in dist, and once in dev for the offline test. --all also builds all
# packages twice in different places and compares the bytes, compiles the crates, tries the packages
# in a bare Debian 12, and builds the Conan package: half an hour on two cores, 8 GiB, as root.
set -euo pipefail

is_full=""
if [ "${1:-}" = --all ]; then is_full=yes && shift; fi
work=${1:?usage: package.sh [--all] WORKDIR}
mkdir -p "$work"
work=$(cd "$work" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$work/target}
case $CARGO_TARGET_DIR in /*) ;; *) CARGO_TARGET_DIR=$PWD/$CARGO_TARGET_DIR ;; esac
unset DESTDIR PKG_CONFIG_PATH KVTIER_CARGO_ARGS KVTIER_VENDOR_DIR KVTIER_PLAIN_ARCHIVE
unset KVTIER_FEATURES KVTIER_PREBUILT_DIR
rm -rf "${work:?}"/{log,out,inst,cm,cm-script,dest,moved,b,bin,away,guest,vendor-out,vendor-inst,home}
rm -rf "$work"/{packages,again,built,unpacked,other-include,two-trees}
mkdir -p "$work"/{log,bin}
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cc=${CC:-cc} cxx=${CXX:-c++}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
passed=0 failed=0

# way NAME COMMAND...: runs COMMAND in a subshell that stops at the first failure.
way() {
    local name=$1 rc=0
    shift
    # Not in an `if` or `||`, where bash disables errexit.
    set +e
    (set -e; "$@") >"$work/log/$name" 2>&1
    rc=$?
    set -e
    if [ $rc -eq 0 ]; then
        echo "ok $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name"
        tail -n 15 "$work/log/$name" | sed 's/^/    /'
        failed=$((failed + 1))
    fi
}

# runs PROGRAM LINKAGE: checks that the program works and is linked as expected.
runs() {
    timeout 600 "$1"
    local needed
    needed=$(readelf -d "$1" | grep -c 'NEEDED.*libkvtier' || true)
    case $2 in
        shared) [ "$needed" -eq 1 ] ;;
        static) [ "$needed" -eq 0 ] ;;
    esac
}

# consume NAME LINKAGE ARGS...: builds and runs the consumer with CMake.
consume() {
    local dir=$work/b/$1 linkage=$2
    shift 2
    cmake "${generator[@]}" -S "$here/consumer" -B "$dir" "$@"
    cmake --build "$dir" -j 2
    runs "$dir/consumer_c" "$linkage"
    runs "$dir/consumer_cpp" "$linkage"
}

# by_pc NAME LINKAGE PREFIX LIBDIR: builds and runs the consumer with pkg-config.
by_pc() {
    local cflags libs args=() rpath=()
    export PKG_CONFIG_PATH=$3/$4/pkgconfig
    [ "$2" = static ] && args=(--static)
    [ "$2" = shared ] && rpath=("-Wl,-rpath,$3/$4")
    [ "$(pkg-config --modversion kvtier)" = "$version" ]
    cflags=$(pkg-config --cflags kvtier)
    libs=$(pkg-config "${args[@]}" --libs kvtier)
    # A mixed link names the archive; the other libraries come from Libs.private.
    [ "$2" = static ] && libs=${libs/-lkvtier/-l:libkvtier.a}
    # shellcheck disable=SC2086
    "$cc" -std=c99 $cflags "$here/consumer/main.c" -Wl,--gc-sections $libs "${rpath[@]}" -o "$work/bin/$1_c"
    # shellcheck disable=SC2086
    "$cxx" -std=c++17 $cflags "$here/consumer/main.cpp" $libs "${rpath[@]}" -o "$work/bin/$1_cpp"
    runs "$work/bin/$1_c" "$2"
    runs "$work/bin/$1_cpp" "$2"
}

layout() { (cd "$1" && find . ! -type d | sort); }

build() {
    "$root/cmake/build.sh" "$work/out"
    "$root/cmake/install.sh" --prefix "$work/inst" --from "$work/out"
    local lib=$work/inst/lib
    [ "$(readlink "$lib/libkvtier.so")" = "libkvtier.so.${version%.*}" ]
    [ "$(readlink "$lib/libkvtier.so.${version%.*}")" = "libkvtier.so.$version" ]
    readelf -d "$lib/libkvtier.so" | grep "SONAME.*libkvtier.so.${version%.*}]"
}

# The list of static libraries in the .pc and Config files equals that of this compiler.
static_list() {
    local libraries
    libraries=$("${RUSTC:-rustc}" --print native-static-libs --crate-type staticlib -o "$work/probe.a" - \
        </dev/null 2>&1 | sed -n 's/.*native-static-libs: //p')
    [ -n "$libraries" ]
    [ "$libraries" = "$(cat "$root/cmake/static-libs.txt")" ]
    grep -F "Libs.private: $libraries" "$work/inst/lib/pkgconfig/kvtier.pc"
}

no_build_paths() {
    local file path sysroot
    # /usr is the toolchain's path on every machine, so it does not identify this one.
    sysroot=$(rustc --print sysroot)
    [ "$sysroot" != /usr ] || sysroot=/nonesuch
    for file in "$work/inst/lib/libkvtier.so" "$work/inst/lib/libkvtier.a"; do
        strings -a "$file" >"$work/strings"
        for path in "$root/" "$work/" "$CARGO_TARGET_DIR/" "${HOME:-/nonesuch}/" "$sysroot/"; do
            if grep -F "$path" "$work/strings"; then return 1; fi
        done
    done
    # The CMake and pkg-config files must not contain the build directory either.
    if grep -rF "$work/" "$work/inst/lib/cmake" "$work/inst/lib/pkgconfig"; then return 1; fi
}

only_kvt() {
    local all
    all=$(nm -g --defined-only "$work/inst/lib/libkvtier.a" | awk 'NF == 3 { print $3 }')
    [ -n "$all" ]
    if grep -v '^kvt_' <<<"$all"; then return 1; fi
    # The archive and the shared library export the same functions.
    diff <(sort <<<"$all") <(nm -D --defined-only "$work/inst/lib/libkvtier.so" | awk '{ print $3 }' | sort)
}

# A program may link another Rust static library, including its standard library.
two_rusts() {
    cat >"$work/other.rs" <<'RUST'
#[unsafe(no_mangle)]
pub extern "C" fn other_caught() -> i32 {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let caught = std::panic::catch_unwind(|| std::thread::spawn(|| panic!("other")).join().is_err());
    std::panic::set_hook(quiet);
    i32::from(caught.unwrap_or(false))
}
RUST
    "${RUSTC:-rustc}" --edition 2024 -O --crate-type staticlib "$work/other.rs" -o "$work/libother.a"
    sed 's/^int main(void) {/int other_caught(void);\n&\n    if (other_caught() != 1) return 9;/' \
        "$here/consumer/main.c" >"$work/two.c"
    for order in "$work/inst/lib/libkvtier.a $work/libother.a" "$work/libother.a $work/inst/lib/libkvtier.a"; do
        # shellcheck disable=SC2046,SC2086
        "$cc" -I"$work/inst/include" "$work/two.c" $order $(cat "$root/cmake/static-libs.txt") -o "$work/bin/two"
        runs "$work/bin/two" static
    done
}

other_compilers() {
    local one
    for one in gcc clang; do
        command -v $one >/dev/null || continue
        # shellcheck disable=SC2046
        $one -I"$work/inst/include" "$here/consumer/main.c" "$work/inst/lib/libkvtier.a" \
            -Wl,--gc-sections $(cat "$root/cmake/static-libs.txt") -o "$work/bin/$one"
        runs "$work/bin/$one" static
    done
}

moved() {
    cp -a "$work/inst" "$work/moved"
    mv "$work/inst" "$work/away"
    local rc=0
    set +e
    (set -e
        consume moved_shared shared -DCMAKE_PREFIX_PATH="$work/moved" -DLINK=shared
        consume moved_static static -DCMAKE_PREFIX_PATH="$work/moved" -DLINK=static
        by_pc moved_pc_shared shared "$work/moved" lib
        by_pc moved_pc_static static "$work/moved" lib)
    rc=$?
    set -e
    mv "$work/away" "$work/inst"
    return $rc
}

destdir_cmake() {
    cmake "${generator[@]}" -S "$root" -B "$work/b/top" -DCMAKE_INSTALL_PREFIX=/usr \
        -DCMAKE_INSTALL_LIBDIR=lib/some-multiarch
    cmake --build "$work/b/top"
    DESTDIR=$work/dest cmake --install "$work/b/top"
    [ "$(ls "$work/dest")" = usr ]
    consume destdir shared -DCMAKE_PREFIX_PATH="$work/dest/usr" \
        -Dkvtier_DIR="$work/dest/usr/lib/some-multiarch/cmake/kvtier"
    by_pc destdir_pc static "$work/dest/usr" lib/some-multiarch
}

cmake_equals_script() {
    cmake --install "$work/b/top" --prefix "$work/cm"
    "$root/cmake/install.sh" --prefix /opt/kvtier --destdir "$work/cm-script" --libdir lib/some-multiarch --from "$work/out"
    diff -r "$work/cm" "$work/cm-script/opt/kvtier"
    diff <(layout "$work/cm") <(layout "$work/cm-script/opt/kvtier")
}

subproject() {
    consume subproject shared -DWAY=subproject -DKVTIER_SOURCE="$root"
    consume subproject static -DWAY=subproject -DKVTIER_SOURCE="$root" -DLINK=static
    # A subproject installs nothing.
    cmake --install "$work/b/subproject" --prefix "$work/guest"
    [ ! -e "$work/guest/lib" ]
}

fetched() {
    consume fetched shared -DWAY=fetch -DKVTIER_SOURCE="$root" -DKVTIER_PREBUILT_DIR="$work/out"
}

prebuilt() {
    CARGO=/bin/false consume prebuilt shared -DWAY=subproject -DKVTIER_SOURCE="$root" -DKVTIER_PREBUILT_DIR="$work/out"
    CARGO=/bin/false consume prebuilt_static static -DWAY=subproject -DKVTIER_SOURCE="$root" \
        -DKVTIER_PREBUILT_DIR="$work/inst" -DLINK=static
}

offline() {
    # Discard the incomplete folder of an interrupted run, and one of other crates.
    if ! cmp -s "$root/Cargo.lock" "$work/vendored"; then
        rm -rf "$work/vendor"
        "$root/cmake/vendor.sh" "$work/vendor"
        cp "$root/Cargo.lock" "$work/vendored"
    fi
    local args
    args=$("$root/cmake/vendor.sh" --args "$work/vendor")
    mkdir -p "$work/home"
    CARGO_HOME=$work/home CARGO_NET_OFFLINE=true KVTIER_VENDOR_DIR=$work/vendor \
        KVTIER_CARGO_ARGS=$args CARGO_TARGET_DIR=$work/target-offline \
        RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup} CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 \
        "$root/cmake/build.sh" "$work/vendor-out" dev
    # Nothing was downloaded. Some versions of cargo create an empty registry folder.
    [ -z "$(find "$work/home" -name '*.crate' -print -quit)" ]
    "$root/cmake/install.sh" --prefix "$work/vendor-inst" --from "$work/vendor-out"
    by_pc offline static "$work/vendor-inst" lib
}

# A rejected version is rejected with words: what is installed, what is asked for, and why.
version_reasons() {
    local asked reason text
    mkdir -p "$work/b/version"
    while IFS='|' read -r asked reason; do
        printf 'cmake_minimum_required(VERSION 3.16)\nproject(asks NONE)\nfind_package(kvtier %s REQUIRED)\n' \
            "$asked" >"$work/b/version/CMakeLists.txt"
        if text=$(cmake -S "$work/b/version" -B "$work/b/version/b" -DCMAKE_PREFIX_PATH="$work/inst" 2>&1); then
            echo "$version passed for $asked"
            return 1
        fi
        text=$(tr -s ' \n' ' ' <<<"$text")
        grep -F "version: $version (the program asks for kvtier $asked: $reason; install that version" \
            <<<"$text" || { echo "$text"; return 1; }
    done <<'ASKED'
0.2|older than asked for
1|older than asked for
0.0.9|before 1.0, minor versions are not compatible with each other
0.2...1.0|outside of the range
ASKED
}

# A program that was compiled with the header of another minor version is refused by kvt_abi_check.
other_header() {
    local minor number
    for minor in 0 2; do
        number=$((minor << 16))
        rm -rf "$work/other-include"
        cp -r "$work/inst/include" "$work/other-include"
        sed -i "s/^\(#define KVT_HEADER_VERSION\) .*/\1 $number/" "$work/other-include/kvtier"/*.h
        grep -rq "^#define KVT_HEADER_VERSION $number" "$work/other-include"
        "$cc" -I"$work/other-include" "$here/consumer/main.c" -L"$work/inst/lib" -lkvtier \
            -Wl,-rpath,"$work/inst/lib" -o "$work/bin/other"
        if "$work/bin/other" 2>"$work/other.txt"; then return 1; fi
        grep "KVT_E_ABI header version 0.$minor.0 does not fit library version $version: rebuild" "$work/other.txt"
    done
}

# The packages that need no build of their own, made twice, with the tool of the tests.
packages() {
    local tool=${KVTIER_TEST_TOOL:-}
    if [ -z "$tool" ]; then
        cargo build --locked --package kvtier-cli --bin kvtier
        tool=$CARGO_TARGET_DIR/debug/kvtier
    fi
    mkdir -p "$work/built/bin"
    cp -a "$work/out/lib" "$work/built/"
    strip -o "$work/built/bin/kvtier" "$tool"
    local kinds="tarball deb wheel sbom"
    # Quickly packed.
    export KVTIER_PREBUILT_DIR=$work/built KVTIER_DEB_OPTIONS="-Zxz -z1"
    # shellcheck disable=SC2086
    "$root/packaging/build.sh" "$work/packages" $kinds
    # shellcheck disable=SC2086
    (umask 077; TZ=Asia/Tokyo "$root/packaging/build.sh" "$work/again" $kinds)
    diff -r "$work/packages" "$work/again"
    (cd "$work/packages" && sha256sum --check SHA256SUMS)
    python3 "$root/packaging/sbom.py" --check "$work/packages"/*.cdx.json
    python3 "$root/packaging/sbom.py" kvtier --features redis,dir,tls,seal,s3 --out "$work/all-features.cdx.json"
    # Crates whose sources the library names in messages are listed.
    local crate crates
    crates=$(strings -a "$work/out/lib/libkvtier.so" | grep -o 'cargo/registry/src/[^/]*/[^/]*' | sed 's|.*/||' | sort -u)
    for crate in $crates; do
        grep -F "\"pkg:cargo/${crate%%-[0-9]*}@" "$work/packages/kvtier-$version.cdx.json"
    done
}

tarball_unpacked() {
    mkdir -p "$work/unpacked"
    tar -xzf "$work/packages"/kvtier-*-linux-*.tar.gz -C "$work/unpacked" --strip-components=1
    "$work/unpacked/bin/kvtier" --version
    grep -q '^Apache-2.0\|Apache License' "$work/unpacked/LICENSE"
    by_pc unpacked shared "$work/unpacked" lib
    by_pc unpacked_static static "$work/unpacked" lib
}

deb_fields() {
    local deb
    for deb in "$work/packages"/*.deb; do
        dpkg-deb --info "$deb" | grep '^ Depends: \(libc6 (>= [0-9.]*), libgcc-s1\|libkvtier0.1 (= \)'
        dpkg-deb --contents "$deb" | awk '$2 != "root/root" { exit 1 }'
        dpkg-deb --fsys-tarfile "$deb" | tar -tf - | grep '/copyright$'
    done
    dpkg-deb --ctrl-tarfile "$work/packages"/libkvtier0.1_*.deb | tar -xOf - ./triggers | grep 'ldconfig'
    if command -v lintian >/dev/null; then
        # Debian itself wants a bug report in the first version.
        lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs "$work/packages"/*.deb
    fi
}

# The recipes of other package managers: they parse, and name this version.
recipes() {
    local recipes=$root/packaging
    grep -Fx "    version = \"$version\"" "$recipes/conan/conanfile.py"
    grep -F "version = \"$version\";" "$recipes/nix/flake.nix"
    python3 - "$recipes" "$version" <<'PYTHON'
import ast, json, pathlib, sys
recipes = pathlib.Path(sys.argv[1])
for path in recipes.rglob("*.py"):
    ast.parse(path.read_text(encoding="utf-8"), str(path))
port = json.loads((recipes / "vcpkg/vcpkg.json").read_text(encoding="utf-8"))
assert port["name"] == "kvtier" and port["version"] == sys.argv[2], port
PYTHON
    if command -v nix-instantiate >/dev/null; then nix-instantiate --parse "$recipes/nix/flake.nix" >/dev/null; fi
}

# Equal bytes from two trees in different places, with another umask, time zone and cargo home.
reproducible() {
    local one=$work/two-trees/a two=$work/two-trees/another/folder/b
    git clone -q "$root" "$one"
    (cd "$one" && CARGO_TARGET_DIR=$work/two-trees/target packaging/build.sh "$work/two-trees/out-a" \
        source tarball deb wheel sbom)
    rm -rf "$work/two-trees/target"
    git clone -q "$one" "$two"
    (umask 077 && cd "$two" && RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup} CARGO_HOME=$work/two-trees/cargo \
        CARGO_TARGET_DIR=$work/two-trees/another/target TZ=Asia/Tokyo \
        packaging/build.sh "$work/two-trees/out-b" source tarball deb wheel sbom)
    rm -rf "$work/two-trees/another/target"
    diff -r "$work/two-trees/out-a" "$work/two-trees/out-b"
}

# What `cargo add kvtier` gives: a program outside of the tree, with the packed crates.
crates() {
    local place=$work/two-trees/crates name
    "$root/packaging/build.sh" "$work/two-trees/out-crates" cargo
    rm -rf "$place" && mkdir -p "$place"
    "$root/cmake/vendor.sh" "$place/vendor"
    for name in kvtier kvtier-macros; do
        tar -xzf "$work/two-trees/out-crates/$name-$version.crate" -C "$place/vendor"
        echo '{"files":{}}' >"$place/vendor/$name-$version/.cargo-checksum.json"
    done
    cargo init --quiet --vcs none --name user "$place/user"
    cd "$place/user"
    mkdir .cargo
    printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "../vendor"\n' \
        >.cargo/config.toml
    cargo add --offline kvtier
    cat >src/main.rs <<'RUST'
fn main() {
    println!("{}", kvtier::policy::registry::ENTRIES.len());
}
RUST
    CARGO_TARGET_DIR=$CARGO_TARGET_DIR/crates cargo run --offline
}

bare_debian() { "$root/packaging/try.sh" "$work/two-trees/out-a" "$work/try"; }

conan_create() {
    local venv=$work/conan/venv
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install -q 'conan>=2,<3'
    export CONAN_HOME=$work/conan/home
    # The test of a recipe is built beside it.
    rm -rf "$work/conan/recipe"
    cp -r "$root/packaging/conan" "$work/conan/recipe"
    "$venv/bin/conan" profile detect --force
    "$venv/bin/conan" create "$work/conan/recipe" -s build_type=Debug -o 'kvtier/*:shared=True' \
        -c "user.kvtier:source=$(echo "$work/two-trees/out-a"/*-vendored.tar.gz)"
    "$venv/bin/conan" create "$work/conan/recipe" -s build_type=Debug -o 'kvtier/*:shared=False' \
        -c "user.kvtier:source=$(echo "$work/two-trees/out-a"/*-vendored.tar.gz)"
}

# The real schema of the format, beside our rules.
sbom_schema() {
    local venv=$work/schema/venv
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install -q 'cyclonedx-python-lib[json-validation]>=11,<12'
    "$venv/bin/python" - "$work/packages"/*.cdx.json <<'PYTHON'
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for name in sys.argv[1:]:
    with open(name, encoding="utf-8") as file:
        wrong = JsonStrictValidator(SchemaVersion.V1_5).validate_str(file.read())
    assert wrong is None, (name, wrong)
PYTHON
}

way build build
way static_list static_list
way no_build_paths no_build_paths
way only_kvt_symbols only_kvt
way find_package consume package shared -DCMAKE_PREFIX_PATH="$work/inst"
way find_package_shared consume package_shared shared -DCMAKE_PREFIX_PATH="$work/inst" -DLINK=shared
way find_package_static consume package_static static -DCMAKE_PREFIX_PATH="$work/inst" -DLINK=static
way pkg_config_shared by_pc pc_shared shared "$work/inst" lib
way pkg_config_static by_pc pc_static static "$work/inst" lib
way static_gcc_clang other_compilers
way two_rust_archives two_rusts
way moved_prefix moved
way destdir destdir_cmake
way install_script cmake_equals_script
way add_subdirectory subproject
way fetch_content fetched
way prebuilt_dir prebuilt
way offline_vendored offline
way version_reasons version_reasons
way other_header_refused other_header
way recipes recipes
way packages packages
way tarball_unpacked tarball_unpacked
way deb_fields deb_fields
if [ -n "$is_full" ]; then
    way sbom_schema sbom_schema
    way packages_reproducible reproducible
    way bare_debian bare_debian
    way crates crates
    way conan conan_create
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
