#!/usr/bin/env bash
# What docs/benchmarks.md holds: the data plane, the updates and the training of one run on this machine.
# Usage: scripts/measure-data-plane.sh [FOLDER WITH PROGRAMS FOR OTHER SYSTEMS [PYTHON]]
# The folder may hold ceiling.py (plain TCP by numpy), tf_ps.py (TensorFlow) and torch_peers.py (PyTorch), which
# are not part of this repository and need root for a network namespace; PYTHON (default: python3) must have what
# they need. The networks of 10 and 25 Gbit/s need root and `tc` as well. Takes twenty minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
peers=${1:-}
python=${2:-python3}
cargo build --release --quiet
export LOGDIR=$(mktemp -d)
trap 'rm -r "$LOGDIR"' EXIT

run() {
    printf '\n$ %s\n' "$*"
    "$@" 2>"$LOGDIR/stderr" || { cat "$LOGDIR/stderr" >&2; exit 1; }
}
flambeau() { run ./target/release/flambeau "$@"; }
# In a network namespace of its own, where TensorFlow's servers, which listen everywhere, are among themselves.
peer() { [ ! -e "$peers/$1" ] || run unshare -n sh -c 'ip link set lo up && exec "$@"' sh "$python" "$peers/$1" "${@:2}"; }
# On loopback with the rate of a network, which both directions share.
on_network() {
    run unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate "$0" burst 4mb latency 50ms && exec "$@"' "$@"
}

peer ceiling.py --roundtrip
flambeau bench dense --seconds 5
flambeau bench dense --seconds 5 --transport unix
for wire in f32 bf16 f16 f32 bf16 f16; do
    flambeau bench dense --seconds 5 --size 67108864 --wire $wire
done
for wire in f32 bf16 f32 bf16 f32 bf16; do
    flambeau bench dense --seconds 5 --size 67108864 --wire $wire --secure
done
for rate in 10gbit 25gbit; do
    if ! command -v tc >/dev/null || ! unshare -n true 2>/dev/null; then
        printf '\nSKIPPED: a network of %s: it needs root and tc\n' $rate
        continue
    fi
    for wire in f32 bf16 f16; do
        on_network $rate ./target/release/flambeau bench dense --seconds 5 --size 67108864 --wire $wire
    done
done
for servers in 1 2 1 2 1 2; do
    flambeau bench dense --seconds 5 --size 67108864 --ps $servers
done
flambeau bench dense --seconds 5 --size 536870912
flambeau bench dense --seconds 5 --size 67108864 --optimizer adam
peer tf_ps.py run --workers 2 --ps 1 --job dense
peer torch_peers.py sendrecv
peer torch_peers.py rpc
flambeau bench apply
flambeau bench train
peer tf_ps.py run --workers 2 --ps 1 --job mlp
peer torch_peers.py ddp
peer torch_peers.py local
