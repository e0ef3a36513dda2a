#!/bin/sh
# The C++ headers as compilers see them: each alone and twice, with the example at its head, by g++ and
# clang++ as C++17; all together as C++17, 20 and 23, with and without exceptions. The generated
# regions are up to date.
#
#   ffi-tests/cpp/headers.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

# holds WHAT COMMAND...: the command succeeds.
holds() {
    what=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        passed=$((passed + 1))
        echo "ok    $what"
    else
        failed=$((failed + 1))
        echo "FAIL  $what"
        head -n 20 "$work/out"
    fi
}

# As they are installed.
mkdir -p "$work/include/kvtier"
cp "$root"/include/kvtier/*.h "$root"/bindings/cpp/*.hpp "$work/include/kvtier/"
strict="-Wall -Wextra -pedantic -Werror -fsyntax-only -I$work/include"

holds "generated regions are up to date" python3 "$root/bindings/cpp/generate.py" --check

# Each example is the body of a function, with these variables.
cat >"$work/prelude" <<'END_OF_PRELUDE'
#include <kvtier/kvtier.hpp>
#include <cstdio>
extern const kvt::runtime runtime;
extern const kvt::namespace_ ns;
extern const kvt::session session;
extern const kvt::transfer transfer;
extern const kvt::identity model;
extern const kvt::attention shape;
extern const kvt_rows_t rows;
extern const std::string_view fingerprint;
extern const std::vector<std::uint32_t> tokens;
extern const std::vector<kvt_view_t> k_views, v_views;
extern const std::vector<void *> pages;
extern const std::vector<std::byte> host;
extern const std::int64_t now_ns;
extern const float query[1024];
extern const std::uint16_t keys[1], values[1];
void compute_next_layer();
template <class... T> void use(const T &...) {}
void example();
void example() {
END_OF_PRELUDE

names="kvtier base runtime memory store session policy attention sparse offload stream device trace"
for header in "$root"/bindings/cpp/*.hpp; do
    name=$(basename "$header" .hpp)
    holds "$name.hpp is one of the known headers" sh -c "echo ' $names ' | grep -q ' $name '"
    # The lines of the opening comment that are indented by five.
    sed -n '/^\/\/\//!q; s/^\/\/\/     //p' "$header" >"$work/$name.example"
    holds "$name.hpp opens with an example of at most 20 lines" \
        awk 'END { exit !(NR > 0 && NR <= 20) }' "$work/$name.example"
    {
        printf '#include <kvtier/%s.hpp>\n#include <kvtier/%s.hpp>\n' "$name" "$name"
        cat "$work/prelude" "$work/$name.example"
        echo '}'
    } >"$work/$name.cpp"
done
echo '#include <kvtier/kvtier.hpp>' >"$work/all.cpp"

for compiler in g++ clang++; do
    command -v "$compiler" >/dev/null || { echo "skip  $compiler is not here"; continue; }
    for name in $names; do
        # shellcheck disable=SC2086
        holds "$name.hpp: alone, twice, its example, $compiler" \
            "$compiler" -std=c++17 $strict "$work/$name.cpp"
    done
    for standard in c++17 c++20 c++2b; do
        for errors in "" -DKVTIER_NO_EXCEPTIONS -fno-exceptions; do
            # shellcheck disable=SC2086
            holds "all headers: $compiler -std=$standard $errors" \
                "$compiler" -std=$standard $errors $strict "$work/all.cpp"
        done
    done
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
