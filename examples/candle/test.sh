#!/bin/bash
# Tests the example on candle:
#
#   examples/candle/test.sh WORK [--bench]
#
# Builds go to WORK and are reused: minutes at first. KVTIER_CANDLE_MODEL names the folder of a Llama
# (config.json, model.safetensors, tokenizer.json); without it only random models are tested. --bench
# measures that model.
# A part that cannot run prints SKIP and the reason.
set -euo pipefail
work=${1:?usage: test.sh WORK [--bench]}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
CARGO_TARGET_DIR=$(cd "$work" && pwd)
export CARGO_TARGET_DIR
cd "$here"
if ! command -v cargo >/dev/null; then
    echo "SKIP: candle's example needs cargo"
    exit 0
fi
if ! cargo fetch --quiet --locked; then
    echo "SKIP: the crates of candle's example cannot be had"
    exit 0
fi
if cargo fmt --version >/dev/null 2>&1; then
    cargo fmt --check
else
    echo "SKIP: cargo fmt is not here"
fi
if cargo clippy --version >/dev/null 2>&1; then
    cargo clippy --locked --release --all-targets -- -D warnings
else
    echo "SKIP: cargo clippy is not here"
fi
cargo test --locked --release -- --nocapture
if [ "${2:-}" = --bench ]; then
    if [ -n "${KVTIER_CANDLE_MODEL:-}" ]; then
        python3 bench.py --program "$CARGO_TARGET_DIR/release/kvtier-candle" --model "$KVTIER_CANDLE_MODEL"
    else
        echo "SKIP: KVTIER_CANDLE_MODEL names no model to measure"
    fi
fi
