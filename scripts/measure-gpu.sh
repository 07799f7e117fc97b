#!/usr/bin/env bash
# Compares training on a GPU with a loop of candle's own (`flambeau local`), for ResNet-50 and for DeepFM with tables:
#
#   scripts/measure-gpu.sh [TURNS]
#
# Prints samples/s without the first steps, in which the GPU loads its kernels. DEVICE is cuda:0 by default. FLAMBEAU names the program, which
# is target/cuda/release/flambeau by default (docs/cuda.md).
set -euo pipefail
turns=${1:-2}
device=${DEVICE:-cuda:0}
flambeau=$(realpath "${FLAMBEAU:-$(dirname "$0")/../target/cuda/release/flambeau}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/resnet50.toml" <<'END'
batch_size = 32
[data]
kind = "random"
options = { samples = 4096, size = 224, channels = 3, classes = 1000 }
[model]
name = "resnet50"
[optimizer]
name = "sgd"
learning_rate = 0.01
[checkpoint]
enabled = false
END

cat >"$folder/deepfm.toml" <<'END'
batch_size = 4096
[data]
kind = "clicks"
options = { samples = 4000000, rows = 1000000 }
[model]
name = "deepfm"
embedding = 16
hidden = [400, 400, 400]
[optimizer]
name = "adam"
learning_rate = 0.001
[[tables]]
tables = "*"
optimizer = { name = "adagrad", learning_rate = 0.05 }
[strategy]
mode = "async"
[checkpoint]
enabled = false
END

# Prints the seconds of a run of so many steps. The other arguments are a command without its job.
seconds() {
    local job=$1 steps=$2
    shift 2
    rm -rf "$folder/run"
    "$flambeau" "$@" "$folder/$job.toml" --set steps="$steps" --set epochs=1 2>/dev/null | tail -1 | python3 -c '
import json, sys
run = json.loads(sys.stdin.readline())
samples = int(sys.argv[1])
print(run["seconds"] if "seconds" in run else samples / run["samples_per_second"])' "$((steps * batch))"
}

measure() {
    local job=$1 few=$2 many=$3
    shift 3
    local batch
    batch=$(sed -n 's/^batch_size = //p' "$folder/$job.toml")
    python3 -c 'import sys; few, many, samples = map(float, sys.argv[1:4]); print(f"{samples / (many - few):10.1f}  {sys.argv[4]}")' \
        "$(seconds "$job" "$few" "$@")" "$(seconds "$job" "$many" "$@")" "$(((many - few) * batch))" "$job: $*"
}

train=(train --json --quiet --device "$device" --run-dir "$folder/run")
for turn in $(seq "$turns"); do
    echo "turn $turn: samples/s"
    measure resnet50 5 45 local --device "$device"
    measure resnet50 5 45 "${train[@]}" --strategy one-device
    measure deepfm 20 170 local --device "$device"
    measure deepfm 20 170 "${train[@]}" --strategy hybrid --workers 1 --ps 2
    measure deepfm 20 170 "${train[@]}" --strategy parameter-server --workers 1 --ps 2 --set strategy.pipeline=1
done
