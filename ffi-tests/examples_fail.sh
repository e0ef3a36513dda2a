#!/bin/sh
# Runs the examples with broken settings: each must exit with 1 and say why on standard error.
#
#   ffi-tests/examples_fail.sh PREFIX
#
# PREFIX is the absolute path of the programs up to their language: PREFIXc_restart, PREFIXcpp_layerwise, ...
# No setting depends on the user, so the script also works as root.
set -eu
prefix=${1:?usage: examples_fail.sh PREFIX}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/file"
passed=0
failed=0

# fails PROGRAM TEXT ARGUMENT...: the program must exit with 1, and its standard error must have TEXT.
fails() {
    program=$1 text=$2
    shift 2
    status=0
    timeout 120 "$prefix$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    if [ "$status" -eq 1 ] && grep -qF -- "$text" "$work/err"; then
        passed=$((passed + 1))
        echo "ok    $program $*"
    else
        failed=$((failed + 1))
        echo "FAIL  $program $* (status $status, expected 1 and: $text)"
        cat "$work/err"
    fi
}

for language in c cpp; do
    fails ${language}_layerwise "did you mean 'host'" "store(hots=64MiB)"
    fails ${language}_layerwise "No such file or directory" "store(disk=disk(path=\"$work/none/kv\", bytes=64MiB))"
    fails ${language}_custom_policy "did you mean 'lru'" lrv
    fails ${language}_stream_weights "needs at least" 1
    fails ${language}_stream_weights "$work/none/model.safetensors" 6 "$work/none"
    fails ${language}_sparse_decode "unknown parameter 'bduget'" "quest(bduget=64)"
    fails ${language}_sparse_decode "unknown name 'qest'" qest
done
fails cpp_hello_kv "Not a directory" "$work/file"
fails cpp_hello_kv "No such file or directory" "$work/none"
fails c_engine "Not a directory" "$work/file"
fails c_engine "No such file or directory" "$work/none"
fails c_restart "Not a directory" "$work/file"
fails c_restart "No such file or directory" "$work/none"
fails c_paged_views "at least 65536 bytes" "store(host=1KiB)"
fails c_policy_alone "did you mean 'horizon'" lru horizn
fails c_policy_alone "custom" custom
fails c_h2o_rows "did you mean 'h2o'" h20
fails c_h2o_rows "does not decide what to evict" "quest(page=16)"
fails c_custom_device "unknown parameter" "store(hosts=1)"
fails c_custom_remote "add remote=custom" "store(host=16MiB)"
fails c_events_router "events" "store(events=-1)"
# Its store lies in the current directory.
cd "$work"
: >hello-kv
fails c_hello_kv "a directory is needed"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
