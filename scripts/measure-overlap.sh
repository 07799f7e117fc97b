#!/usr/bin/env bash
# Trains with two workers of multi-worker-mirrored on a network of a given rate, with gradients in one bucket and in several, in
# turns, and prints the milliseconds of a step. Needs root and `tc`, for a network namespace, and python3.
#
#   cargo build --release --locked -p flambeau && scripts/measure-overlap.sh [RATE [TURNS [STEPS]]]
#
# RATE limits loopback, which both directions share (2gbit by default; `none`: no limit). FLAMBEAU is the path of the program.
set -euo pipefail
rate=${1:-2gbit}
turns=${2:-3}
steps=${3:-25}
export FLAMBEAU=${FLAMBEAU:-$(realpath "$(dirname "$0")/../target/release/flambeau")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/job.toml" <<END
epochs = 9
steps = $steps
batch_size = 512
[data]
kind = "random"
[model]
name = "mlp"
hidden = [1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024]
[optimizer]
name = "sgd"
learning_rate = 0.01
[strategy]
name = "multi-worker-mirrored"
[cluster]
workers = 2
END

# In a network namespace: the coordinator and two workers that listen on ports, so that gradients cross the network.
cat >"$work/train.sh" <<'END'
set -euo pipefail
work=$1 rate=$2 run=$3
ip link set lo up
[[ $rate == none ]] || tc qdisc add dev lo root tbf rate "$rate" burst 4mb latency 50ms
"$FLAMBEAU" coordinator "$work/job.toml" --listen 127.0.0.1:7070 "${@:4}" --run-dir "$run" >"$run.log" 2>&1 &
coordinator=$!
for port in 7002 7003; do
    "$FLAMBEAU" worker --coordinator 127.0.0.1:7070 --listen "127.0.0.1:$port" >"$run-$port.log" 2>&1 &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
wait "$coordinator" || { cat "$run.log" >&2; exit 1; }
wait
END

for turn in $(seq "$turns"); do
    for mebibytes in 1000 absent 25 4; do
        run=$work/$turn-$mebibytes
        setting=()
        [[ $mebibytes == absent ]] || setting=(--set "strategy.bucket_mebibytes=$mebibytes")
        unshare -n bash "$work/train.sh" "$work" "$rate" "$run" "${setting[@]}"
        python3 - "$turn" "$mebibytes" "$run/summary.json" <<'END'
import json, sys
turn, mebibytes, path = sys.argv[1:]
summary = json.load(open(path))
print(f"turn {turn}, bucket_mebibytes {mebibytes}: {1000 * summary['seconds'] / summary['steps']:.0f} ms a step")
END
    done
done
