#!/usr/bin/env bash
# The table "How fast" of the README: the same model trained by candle alone in one process with one
# thread, and by 1, 2 and 4 workers, in one run on this machine.
# Usage: scripts/measure-training.sh [FOLDER OF MNIST'S FOUR FILES] [more flags of `flambeau bench train`]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -gt 0 ] && [ -d "$1" ]; then
    data=(--data mnist --data-dir "$1" --epochs 2)
    shift
else
    echo "no folder with MNIST was given: measuring with the digits that are part of the program" >&2
    data=(--data digits --epochs 40)
fi
cargo build --release --quiet
exec ./target/release/flambeau bench train "${data[@]}" --hidden 256 --optimizer adam --ps 2 --worker-counts 1,2,4 --turns 1 "$@"
