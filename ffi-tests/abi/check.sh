#!/bin/sh
# What the shared object shows to the world, and what its header asks of compilers.
#
#   ffi-tests/abi/check.sh LIBDIR [--bless]     --bless renews symbols.txt
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
libdir=$(cd "${1:?usage: check.sh LIBDIR [--bless]}" && pwd)
bless=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok    $1"; }
bad() { failed=$((failed + 1)); echo "FAIL  $1"; }
# same NAME FILE FILE: the two files are equal.
same() {
    if diff -u "$2" "$3" >"$work/diff"; then ok "$1"; else bad "$1"; cat "$work/diff"; fi
}
# holds NAME COMMAND...: the command succeeds.
holds() {
    name=$1
    shift
    if "$@" >"$work/out" 2>&1; then ok "$name"; else bad "$name"; head -n 20 "$work/out"; fi
}

so=$(readlink -f "$libdir/libkvtier.so")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
case $version in 0.*) soversion=${version%.*} ;; *) soversion=${version%%.*} ;; esac

export LC_ALL=C
nm -D --defined-only "$so" | awk '{print $3}' | sed 's/@.*//' | sort >"$work/symbols"
[ "$bless" = --bless ] && cp "$work/symbols" "$here/symbols.txt"
same "exported symbols are those of symbols.txt" "$here/symbols.txt" "$work/symbols"
python3 "$here/layout.py" --functions | sort >"$work/functions"
same "the header declares what is exported" "$work/symbols" "$work/functions"
sort -u "$here/symbols.txt" >"$work/sorted"
same "symbols.txt is sorted, each once" "$here/symbols.txt" "$work/sorted"
cat "$root"/include/kvtier/*.h | grep -vE '^ *(\*|///)' | grep -oE '\bkvt_[a-z0-9_]+\(' |
    sort | uniq -d >"$work/twice"
: >"$work/none"
same "no function is declared twice" "$work/none" "$work/twice"

readelf -dW "$so" >"$work/dynamic"
sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' "$work/dynamic" >"$work/needed"
strange=$(grep -vE '^(libc|libm|libgcc_s|libpthread|libdl|ld-linux-[a-z0-9-]+|linux-vdso)\.so' \
    "$work/needed" || true)
if [ -z "$strange" ]; then ok "needs only: $(tr '\n' ' ' <"$work/needed")"; else bad "needs $strange"; fi
holds "soname is libkvtier.so.$soversion" grep -qF "[libkvtier.so.$soversion]" "$work/dynamic"
holds "the file is libkvtier.so.$version" test "$(basename "$so")" = "libkvtier.so.$version"
holds "the links lead to it" test "$(readlink -f "$libdir/libkvtier.so.$soversion")" = "$so"
holds "is never unloaded (NODELETE)" grep -qE 'FLAGS_1.*NODELETE' "$work/dynamic"
holds "binds at load (NOW)" grep -qE '\((FLAGS|FLAGS_1)\).*NOW' "$work/dynamic"
readelf -lW "$so" >"$work/segments"
holds "is read-only after relocation (RELRO)" grep -q GNU_RELRO "$work/segments"
holds "has no executable stack" sh -c "! grep -qE 'GNU_STACK.*E ' '$work/segments'"
holds "asks for no rpath" sh -c "! grep -qE 'RPATH|RUNPATH' '$work/dynamic'"
holds "has no text relocations" sh -c "! grep -q TEXTREL '$work/dynamic'"
nm -D --undefined-only "$so" >"$work/undefined"
holds "takes no allocator of its own, no output, no exit" \
    sh -c "! grep -wE ' (exit|_exit|quick_exit|signal|setlocale|putenv|setenv|printf|puts)(@|\$)' '$work/undefined'"

strings -a "$so" >"$work/strings"
for path in "$root" "$PWD" "${HOME:-/nowhere}" "${CARGO_TARGET_DIR:-$root/target}"; do
    [ "$path" = / ] && continue
    grep -F "$path/" "$work/strings" >"$work/paths" || true
    same "no path under \$(basename) '$(basename "$path")' inside" "$work/none" "$work/paths"
done

# Each header alone, and twice, with everything that may include it.
for header in "$root"/include/kvtier/*.h; do
    name=$(basename "$header" .h)
    printf '#include <kvtier/%s.h>\n' "$name" >"$work/once_$name.c"
    printf '#include <kvtier/%s.h>\n#include <kvtier/%s.h>\n' "$name" "$name" >"$work/twice_$name.c"
done
cat >"$work/init.c" <<'END'
#include <kvtier/kvtier.h>
uint64_t kvt_test_sizes(void);
uint64_t kvt_test_sizes(void) {
    kvt_runtime_opts_t a = KVT_RUNTIME_OPTS_INIT;
    kvt_queue_opts_t b = KVT_QUEUE_OPTS_INIT;
    kvt_budget_opts_t c = KVT_BUDGET_OPTS_INIT;
    kvt_account_opts_t d = KVT_ACCOUNT_OPTS_INIT;
    kvt_buffer_opts_t e = KVT_BUFFER_OPTS_INIT;
    kvt_submit_opts_t f = KVT_SUBMIT_OPTS_INIT;
    return a.struct_size + b.struct_size + c.struct_size + d.struct_size + e.struct_size +
           f.struct_size;
}
END
strict="-Wall -Wextra -pedantic -Werror -fsyntax-only -I$root/include"
# matrix LANGUAGE STANDARD COMPILER
matrix() {
    command -v "$3" >/dev/null || { echo "SKIP: $3 is not here"; return 0; }
    # Designated initialisers and uninitialised rest are what the macros are made of.
    extra=-Wno-missing-field-initializers
    # One run of the compiler for all headers: each file is a translation unit of its own.
    # shellcheck disable=SC2086
    holds "headers: alone, twice, initialised, $3 -std=$2" "$3" -x "$1" -std="$2" $strict $extra \
        "$work"/once_*.c "$work"/twice_*.c "$work/init.c"
}
for standard in c99 c11 c17 c2x; do
    for compiler in gcc clang; do matrix c "$standard" "$compiler"; done
done
for standard in c++11 c++14 c++17 c++20 c++2b; do
    for compiler in g++ clang++; do matrix c++ "$standard" "$compiler"; done
done
# All warnings that clang has, in C. Some are about the code around the headers, not about them.
if command -v clang >/dev/null; then
    for standard in c99 c11 c17 c2x; do
        # shellcheck disable=SC2086
        holds "headers: clang -Weverything -std=$standard" clang -std=$standard -Weverything -Werror \
            -Wno-padded -Wno-pre-c11-compat -Wno-unknown-warning-option -fsyntax-only -I"$root/include" \
            "$work"/once_*.c
    done
fi
holds "layout.txt agrees" python3 "$here/layout.py"

echo "sizes: $(stat -c %s "$so") bytes shared, $(stat -c %s "$libdir/libkvtier.a") static;" \
    "$(wc -l <"$work/symbols") functions"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
