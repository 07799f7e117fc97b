#!/usr/bin/env bash
# What checkpoints take from training: pairs of the same job with and without them, one after the other, in turns.
# 20 million parameters with Adam's slots (240 MB), a checkpoint every 10 s. Prints one line a pair and the medians.
# Usage: scripts/measure-checkpoints.sh [PAIRS [MODE]]
set -euo pipefail
cd "$(dirname "$0")/.."
pairs=${1:-20} mode=${2:-async}
cargo build --release --quiet
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

speed() { # checkpoint.enabled
    target/release/flambeau train --ps 1 --workers 1 --mode "$mode" --data random --model mlp --hidden 4096,4096 \
        --steps 215 --set checkpoint.every_seconds=10 --set "checkpoint.enabled=$1" --run-dir "$runs/run" --json --quiet |
        grep -o '"samples_per_second":[0-9.]*' | cut -d: -f2
    rm -rf "$runs/run"
}

for pair in $(seq "$pairs"); do
    if ((pair % 2)); then with=$(speed true) without=$(speed false); else without=$(speed false) with=$(speed true); fi
    echo "$with $without"
done | awk '{ print "with", $1, "without", $2, "samples/s; ratio", $1 / $2; print $1 / $2 > "'"$runs"'/ratios" }'
sort -n "$runs/ratios" | awk '{ r[NR] = $1 } END {
    print "ratio: median", (r[int((NR + 1) / 2)] + r[int(NR / 2) + 1]) / 2, "smallest", r[1], "largest", r[NR] }'
