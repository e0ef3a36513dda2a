#!/bin/bash
# Tests the example on candle:
#
#   examples/candle/test.sh WORK [--bench]
#
# Builds go to WORK and are reused: minutes at first. KVTIER_CANDLE_MODEL names the folder of a Llama
# (config.json, model.safetensors, tokenizer.json); without it only random models are tested. --bench
# measures that model.
set -euo pipefail
work=${1:?usage: test.sh WORK [--bench]}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
CARGO_TARGET_DIR=$(cd "$work" && pwd)
export CARGO_TARGET_DIR
cd "$here"
cargo fmt --check
cargo clippy --locked --release --all-targets -- -D warnings
cargo test --locked --release -- --nocapture
if [ "${2:-}" = --bench ]; then
    if [ -n "${KVTIER_CANDLE_MODEL:-}" ]; then
        python3 bench.py --program "$CARGO_TARGET_DIR/release/kvtier-candle" --model "$KVTIER_CANDLE_MODEL"
    else
        echo "SKIP: KVTIER_CANDLE_MODEL names no model to measure"
    fi
fi
