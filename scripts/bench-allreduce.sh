#!/usr/bin/env bash
# Adds up vectors among 2, 4 and 8 processes of this machine, by Flambeau and by gloo in turns, and prints the medians and
# their ratios:
#
#   pip install torch
#   cargo build --release --locked -p flambeau && scripts/bench-allreduce.sh PEER [TURNS] [RANKS ...]
#
# PEER is a Python program with a function allreduce(rank, world, port) that measures gloo with 16 KiB, 1 MiB and 64 MiB, and
# in which rank 0 prints a JSON line with "size" (16KB, 1MB or 64MB) and "ms" for each. TURNS is 5 by default, RANKS 2 4 8.
# PYTHON names the Python that has torch, FLAMBEAU the program, TRANSPORT how its processes connect (unix, or tcp), and
# SECONDS_EACH the seconds of each of its rows (3).
set -euo pipefail
if [[ $# -lt 1 || ! -f $1 ]]; then
    echo "usage: $0 PEER [TURNS] [RANKS ...]; PEER is the Python program that measures gloo" >&2
    exit 2
fi
peer=$(realpath "$1")
turns=${2:-5}
ranks=("${@:3}")
[[ ${#ranks[@]} -gt 0 ]] || ranks=(2 4 8)
python=${PYTHON:-python3}
flambeau=${FLAMBEAU:-$(dirname "$0")/../target/release/flambeau}
sizes=(16384 1048576 67108864)

measured=$(mktemp)
trap 'rm -f "$measured"' EXIT

# Each line: the implementation, a tab, and its JSON.
ours() {
    "$flambeau" bench allreduce --json --transport "${TRANSPORT:-unix}" --seconds "${SECONDS_EACH:-3}" --ranks "$1" $(printf -- '--size %s ' "${sizes[@]}") |
        sed "s/^/flambeau\t/"
}

# Given as an argument, because the processes that it starts cannot read a program from standard input again.
gloo=$(cat <<'PEER'
import importlib, os, socket, sys
import torch.multiprocessing

path, ranks = sys.argv[1], int(sys.argv[2])
folder, name = os.path.split(path)
# The processes that it starts import the module by its name.
sys.path.insert(0, folder)
peer = importlib.import_module(name.removesuffix(".py"))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
torch.multiprocessing.spawn(peer.allreduce, args=(ranks, port), nprocs=ranks)
PEER
)

theirs() {
    "$python" -c "$gloo" "$peer" "$1" | sed "s/^/gloo $1\t/"
}

for ((turn = 1; turn <= turns; turn++)); do
    for n in "${ranks[@]}"; do
        echo "turn $turn of $turns, $n processes ..." >&2
        ours "$n" >>"$measured"
        theirs "$n" >>"$measured"
    done
done

"$python" - "$measured" <<'TABLE'
import collections, json, statistics, sys

BYTES = {"16KB": 16 << 10, "1MB": 1 << 20, "64MB": 64 << 20}
ours, shares, theirs = (collections.defaultdict(list) for _ in range(3))
for line in open(sys.argv[1]):
    who, _, text = line.partition("\t")
    if not text.startswith("{"):
        continue
    found = json.loads(text)
    if who == "flambeau":
        for row in found["rows"]:
            ours[row["ranks"], row["bytes"]].append(row["milliseconds"])
            shares[row["ranks"], row["bytes"]].append(row["share_of_machine_bandwidth"])
    else:
        theirs[int(who.split()[1]), BYTES[found["size"]]].append(found["ms"])
if not ours or ours.keys() != theirs.keys():
    sys.exit(f"the rows differ: Flambeau's {sorted(ours)}, gloo's {sorted(theirs)}")
print("| ranks | bytes | Flambeau ms | of memory, all cores | gloo ms | gloo / Flambeau, each turn |")
print("| --- | --- | --- | --- | --- | --- |")
for key in sorted(ours):
    ratios = [gloo / flambeau for flambeau, gloo in zip(ours[key], theirs[key])]
    print(
        f"| {key[0]} | {key[1]} | {statistics.median(ours[key]):.3f} | {statistics.median(shares[key]):.2f} "
        f"| {statistics.median(theirs[key]):.3f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )
TABLE
