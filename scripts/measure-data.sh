#!/usr/bin/env bash
# Compares the program's readers with pyarrow: the same generated table in several forms, each read in turns on one thread.
# pyarrow reads into columns of float32; the program fits columns, and makes shuffled batches of them.
#
#   scripts/measure-data.sh [FLAMBEAU [ROWS]]     needs python3 with numpy and pyarrow (PYTHON names another one)
set -euo pipefail
program=${1:-target/release/flambeau}
rows=${2:-1000000}
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

"$python" - "$folder" "$rows" <<'PYTHON'
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

folder, rows = sys.argv[1], int(sys.argv[2])
random = np.random.default_rng(1)
columns = {f"x{i}": random.normal(size=rows).astype(np.float32) for i in range(16)}
columns["y"] = random.integers(0, 2, rows)
table = pa.table(columns)
pa.csv.write_csv(table, f"{folder}/table.csv")
for codec in ["none", "snappy", "zstd"]:
    pa.parquet.write_table(table, f"{folder}/{codec}.parquet", compression=codec, row_group_size=1 << 16)
names = ["csv:table.csv", "parquet:none.parquet", "parquet:snappy.parquet", "parquet:zstd.parquet"]
for name in names:
    kind, file = name.split(":")
    for stream in ["false", "true"]:
        with open(f"{folder}/{file.replace('.', '-')}-{stream}.toml", "w") as job:
            job.write(f'[data]\nkind = "{kind}"\ndir = "{folder}/{file}"\nlabel = "y"\nstream = {stream}\n')
PYTHON

for turn in 1 2 3; do
    "$program" bench data --turns 1 --json "$folder"/*-{false,true}.toml >"$folder/ours-$turn.json"
    "$python" - "$folder" >"$folder/theirs-$turn.json" <<'PYTHON'
import json
import sys
import time

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

pa.set_cpu_count(1)
pa.set_io_thread_count(1)
folder = sys.argv[1]
seconds = {}
for file in ["table.csv", "none.parquet", "snappy.parquet", "zstd.parquet"]:
    began = time.perf_counter()
    if file.endswith(".csv"):
        read = pa.csv.ReadOptions(use_threads=False)
        types = {f"x{i}": pa.float32() for i in range(16)}
        convert = pa.csv.ConvertOptions(column_types=types)
        table = pa.csv.read_csv(f"{folder}/{file}", read_options=read, convert_options=convert)
    else:
        table = pa.parquet.read_table(f"{folder}/{file}", use_threads=False)
    columns = [table[f"x{i}"].cast(pa.float32()) for i in range(16)]
    seconds[file] = time.perf_counter() - began
print(json.dumps(seconds))
PYTHON
done

"$python" - "$folder" "$rows" <<'PYTHON'
import json
import pathlib
import statistics
import sys

folder, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ours, theirs = {}, {}
for turn in [1, 2, 3]:
    for row in json.loads((folder / f"ours-{turn}.json").read_text())["rows"]:
        name, streamed = pathlib.Path(row["job"]).stem.rsplit("-", 1)
        ours.setdefault((name.replace("-", "."), streamed), []).append(row)
    for name, seconds in json.loads((folder / f"theirs-{turn}.json").read_text()).items():
        theirs.setdefault(name, []).append(seconds)
print("| file | streamed | open s | pass s | samples/s | pyarrow rows/s | of pyarrow | read alone, of pyarrow |")
print("|---|---|---|---|---|---|---|---|")
for (name, streamed), found in sorted(ours.items()):
    opened = statistics.median(row["open_seconds"] for row in found)
    read = statistics.median(row["pass_seconds"] for row in found)
    pyarrow = statistics.median(theirs[name])
    alone = opened if streamed == "false" else read
    print(
        f"| {name} | {streamed} | {opened:.2f} | {read:.2f} | {rows / (opened + read):.0f} | {rows / pyarrow:.0f} "
        f"| {pyarrow / (opened + read):.2f} | {pyarrow / alone:.2f} |"
    )
PYTHON
