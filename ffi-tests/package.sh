#!/bin/bash
# Tests every way in which kvtier is packaged:  ffi-tests/package.sh WORKDIR
#
# Prints `ok NAME` or `FAIL NAME` for each test, and `N passed, M failed` at the end. The logs stay
# in WORKDIR/log. Builds once in release, and once in dev for the offline test.
set -euo pipefail

work=${1:?usage: package.sh WORKDIR}
mkdir -p "$work"
work=$(cd "$work" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$work/target}
case $CARGO_TARGET_DIR in /*) ;; *) CARGO_TARGET_DIR=$PWD/$CARGO_TARGET_DIR ;; esac
unset DESTDIR PKG_CONFIG_PATH KVTIER_CARGO_ARGS KVTIER_VENDOR_DIR KVTIER_PLAIN_ARCHIVE
rm -rf "$work"/{log,out,inst,cm,cm-script,dest,moved,b,bin,away,guest,vendor-out,vendor-inst,home}
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
        for path in "$root/" "$work/" "$CARGO_TARGET_DIR/" "${HOME:-/nonesuch}/" "$sysroot/"; do
            if strings -a "$file" | grep -F "$path"; then return 1; fi
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
    # Discard the incomplete folder of an interrupted run.
    if [ ! -e "$work/vendored" ]; then
        rm -rf "$work/vendor"
        "$root/cmake/vendor.sh" "$work/vendor"
        touch "$work/vendored"
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
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
