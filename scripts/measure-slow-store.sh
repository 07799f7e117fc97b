#!/usr/bin/env bash
# What a slow store of checkpoints takes from sync training: 20 million parameters with Adam's slots (240 MB) written to
# an S3 server through a relay that lets a few MB/s pass. Prints the longest times between two steps and when checkpoints
# were whole, for each amount that a server may set aside.
# Usage: scripts/measure-slow-store.sh [MB/s [MiB ...]]     needs moto_server (pip install 'moto[server]') on the PATH
set -euo pipefail
cd "$(dirname "$0")/.."
rate=${1:-8}
shift || true
(($#)) || set -- 64 512
cargo build --release --quiet
runs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$runs"' EXIT

moto_server -H 127.0.0.1 -p 5999 >"$runs/moto.log" 2>&1 &
python3 - "$rate" <<'PYTHON' &
import asyncio, sys

async def pipe(reader, writer, rate=None):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
        if rate:
            await asyncio.sleep(len(data) / rate)
    writer.close()

async def relay(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", 5999)
    rate = float(sys.argv[1]) * 1e6
    await asyncio.gather(pipe(reader, there[1], rate), pipe(there[0], writer), return_exceptions=True)

async def main():
    await (await asyncio.start_server(relay, "127.0.0.1", 5998)).serve_forever()

asyncio.run(main())
PYTHON
export AWS_ACCESS_KEY_ID=nobody AWS_SECRET_ACCESS_KEY=nothing AWS_REGION=us-east-1
export AWS_ENDPOINT=http://127.0.0.1:5998 AWS_ALLOW_HTTP=true
until curl --silent --fail --output /dev/null --request PUT http://127.0.0.1:5999/bucket; do sleep 1; done

for mebibytes in "$@"; do
    target/release/flambeau train --ps 1 --workers 1 --mode sync --data random --model mlp --hidden 4096,4096 \
        --steps 240 --set checkpoint.every_seconds=15 --set "checkpoint.aside_mebibytes=$mebibytes" \
        --set "checkpoint.location=s3://bucket/$mebibytes" --set log_every=2 --run-dir "$runs/$mebibytes" --quiet >/dev/null
    python3 - "$mebibytes" "$runs/$mebibytes/metrics.jsonl" <<'PYTHON'
import json, sys

records = [json.loads(line) for line in open(sys.argv[2])]
at = [record["seconds"] for record in records if record["event"] == "steps"]
gaps = sorted((round(after - before, 1) for before, after in zip(at, at[1:])), reverse=True)
whole = [round(record["seconds"], 1) for record in records if record["event"] == "checkpoint"]
print(f"{sys.argv[1]} MiB: trained for {at[-1]:.0f} s; longest between two steps {gaps[:4]} s; checkpoints at {whole} s")
PYTHON
done
