#!/bin/bash
# Builds the manual:
#
#   docs/build.sh OUT WORK
#
# OUT gets the book (index.html), the reference of the C interface (reference/c-api/) and the man pages
# (man/); it is emptied first. WORK keeps mdBook, which is built from source once.
#
#   KVTIER              the tool that writes man pages; default CARGO_TARGET_DIR/debug/kvtier
#   KVTIER_MDBOOK       an mdBook that is used instead
#   KVTIER_SOURCE_URL   source browser for links to files of the repository, such as
#                       https://HOST/kvtier/blob/v0.1.0; without it these files are copied
#
# Needs cargo, python3 and doxygen; a network only for mdBook's crates. Any warning is a failure.
set -euo pipefail

[ $# -eq 2 ] || { sed -n '2,/^set -/p' "$0" | sed -n 's/^# \{0,1\}//p'; exit 2; }
docs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$docs")
mkdir -p "$1" "$2"
out=$(cd "$1" && pwd) work=$(cd "$2" && pwd)
version=0.5.4

mdbook=${KVTIER_MDBOOK:-$work/mdbook/bin/mdbook}
if ! "$mdbook" --version 2>/dev/null | grep -qx "mdbook v$version"; then
    # The smallest set of features, unoptimised: the book is built in a second all the same.
    echo "building mdbook $version"
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$work/mdbook-target cargo install --quiet --debug --locked \
        --version "$version" --root "$work/mdbook" --no-default-features --features search mdbook
    rm -rf "$work/mdbook-target"
    mdbook=$work/mdbook/bin/mdbook
fi

# The pages. mdBook reports what it cannot do, and goes on.
echo "pages"
log=$work/mdbook.log
rm -rf "${out:?}"/* "$work/sources"
KVTIER_SOURCE_LIST=$work/sources "$mdbook" build --dest-dir "$out" "$docs" >"$log" 2>&1 || { cat "$log"; exit 1; }
if grep -E '(WARN|ERROR)' "$log"; then exit 1; fi
# What belongs to the building of the book, not to the book.
rm -rf "$out"/{build.sh,check.py,screens.sh,book.toml,checks,tools}
find "$out" -name '*.py' -delete
[ ! -s "$work/sources" ] || python3 "$docs/tools/repository.py" copy "$work/sources" "$out"

echo "C interface"
(
    cd "$docs"
    cat tools/Doxyfile
    echo "INPUT = $root/include/kvtier tools/c-api.md"
    echo "STRIP_FROM_PATH = $root/include"
    echo "OUTPUT_DIRECTORY = $out/reference/c-api"
    # The tag came with 1.9.5; c-api.css has the dark scheme.
    if ! printf '1.9.4\n%s\n' "$(doxygen --version | cut -d ' ' -f 1)" | sort -V -r | head -n 1 | grep -qx 1.9.4; then
        echo "HTML_COLORSTYLE = LIGHT"
    fi
) >"$work/Doxyfile"
mkdir -p "$out/reference/c-api"
(cd "$docs" && doxygen "$work/Doxyfile") >"$work/doxygen.log" 2>&1 || { cat "$work/doxygen.log"; exit 1; }
if grep -iE 'warning|error' "$work/doxygen.log"; then exit 1; fi

echo "man pages"
kvtier=${KVTIER:-${CARGO_TARGET_DIR:-$root/target}/debug/kvtier}
[ -x "$kvtier" ] || { echo "$kvtier is missing: run 'cargo build', or set KVTIER to the tool"; exit 1; }
"$kvtier" man "$out/man"
echo "built in $out"
