#!/bin/sh
# Vendors the crates for a build without network:
#
#   cmake/vendor.sh DIR          (once, with network) puts the sources into DIR
#   KVTIER_VENDOR_DIR=DIR CARGO_NET_OFFLINE=true \
#   KVTIER_CARGO_ARGS="$(cmake/vendor.sh --args DIR)" cmake/build.sh OUTDIR
#
# Nothing in the tree changes: the replacement of the registry is an argument to cargo,
# not a config file. DIR must not contain spaces.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
case ${1:-} in
    '' | -h | --help) echo "usage: vendor.sh DIR | vendor.sh --args DIR" >&2; exit 2 ;;
    --args)
        dir=$(cd "${2:?}" && pwd)
        echo "--offline --config source.crates-io.replace-with='vendored'" \
            "--config source.vendored.directory='$dir'"
        ;;
    *)
        mkdir -p "$1"
        dir=$(cd "$1" && pwd)
        cd "$root"
        "${CARGO:-cargo}" vendor --locked --versioned-dirs "$dir" >/dev/null
        ;;
esac
