#!/usr/bin/env python3
"""A large embedding table: its growth, checkpoints of all and of changed rows, and a restore to more servers.

    cargo build --release && scripts/bench-large-table.py [--rows 100000000] [--folder FOLDER]

DLRM of dimension 16 with row-wise Adagrad trains on generated clicks, with ids drawn evenly, with one worker:

1. On two servers, until the table has the rows. The last checkpoint has all of them.
2. On three servers, from that checkpoint. The new run begins with a checkpoint of all rows. The next one comes after steps that
   change 1 % of the rows, and has the changed rows alone. The third has all rows again, while the worker trains.
3. The same without checkpoints after the first, for the pace of training.

The folder needs 250 bytes for each row, the memory 150.
"""
import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAMBEAU = Path(__file__).parent.parent / "target" / "release" / "flambeau"
FIELDS = 26
BATCH = 1024
NEVER = 1000000

JOB = """
name = "large"
epochs = {epochs}
batch_size = {batch}

[data]
kind = "clicks"

[data.options]
samples = {samples}
rows = {ids}
shared = true
exponent = 0.0

[model]
name = "dlrm"
embedding = 16
hidden = [32]

[[tables]]
tables = "*"
optimizer = {{ name = "row-adagrad", learning_rate = 0.05 }}
buckets = 1024

[checkpoint]
every_seconds = {never}
every_steps = {every}
increments = 1

[strategy]
mode = "async"
"""


class Cluster:
    """A coordinator, servers and a worker. They are killed at the end of a `with` block."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.coordinator, *self.servers, self.worker):
            process.kill()
            process.wait()

    def __init__(self, folder, name, job, servers, restore=None):
        self.run = folder / name
        self.log = folder / f"{name}.log"
        (folder / f"{name}.toml").write_text(f"{job}\n[cluster]\nps = {servers}\nworkers = 1\n")
        address = f"127.0.0.1:{random.randint(20000, 30000)}"
        none = "127.0.0.1:0"
        restored = ["--restore", restore] if restore else []
        self.began = time.monotonic()
        self.coordinator = self.start(
            "coordinator", folder / f"{name}.toml", "--listen", address, "--run-dir", self.run,
            "--metrics-listen", none, *restored,
        )
        self.servers = [
            self.start("ps-server", "--coordinator", address, "--listen", none, "--metrics-listen", none)
            for _ in range(servers)
        ]
        self.worker = self.start("worker", "--coordinator", address, "--metrics-listen", none)
        self.peak = 0

    def start(self, *command):
        log = open(self.log, "a")
        return subprocess.Popen([FLAMBEAU, *command], stdout=log, stderr=log)

    def records(self, event):
        """The records of metrics.jsonl of one kind."""
        try:
            # The last line may not be whole yet.
            lines = (self.run / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [record for record in map(json.loads, lines) if record["event"] == event]

    def look(self):
        """Notes the servers' memory."""
        peak = 0
        for server in self.servers:
            if server.poll() is not None:
                return
            for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
                peak += int(line.split()[1]) << 10 if line.startswith("VmHWM") else 0
        self.peak = max(self.peak, peak)

    def until(self, done):
        """Waits until `done` returns something else than none, and returns that."""
        while True:
            failed = [process for process in (self.coordinator, *self.servers, self.worker) if process.poll()]
            if failed:
                sys.exit(f"a process has ended with {failed[0].returncode}:\n{self.log.read_text()[-3000:]}")
            found = done()
            if found is not None:
                return found
            self.look()
            time.sleep(0.2)

    def end(self):
        self.until(self.coordinator.poll)
        for process in (*self.servers, self.worker):
            process.wait(60)


def size(run, number):
    """The bytes of a checkpoint."""
    folder = run / "checkpoints" / f"checkpoint-{number:012}"
    return sum(file.stat().st_size for file in folder.iterdir())


def pace(steps, start, end):
    """Samples a second between two moments of a run."""
    within = [record for record in steps if start <= record["seconds"] <= end]
    first, last = within[0], within[-1]
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def written(run, number):
    """The seconds in which the slowest server has written its part of a checkpoint."""
    lines = [line for line in run.log.read_text().splitlines() if "checkpoint's part" in line]
    of = [line for line in lines if f"number={number} " in line.replace("\x1b[3m", "")]
    return max(float(line.rsplit("seconds=", 1)[1]) for line in of)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--rows", type=int, default=100_000_000)
    arguments.add_argument("--folder", type=Path, help="where the checkpoints are written; default: a temporary folder")
    arguments = arguments.parse_args()
    # Of twice as many ids, drawn evenly, half are there after as many draws as rows times 2 ln 2.
    ids = 2 * arguments.rows
    grown = math.ceil(ids * math.log(2) / (FIELDS * BATCH))
    one_percent = math.ceil(0.01 * arguments.rows / (FIELDS * BATCH))
    job = lambda epochs, every: JOB.format(
        epochs=epochs, samples=grown * BATCH, batch=BATCH, ids=ids, never=NEVER, every=every
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        folder = Path(folder)
        with Cluster(folder, "grow", job(1, NEVER), servers=2) as run:
            run.end()
        steps, saved = run.records("steps")[-1], run.records("checkpoint")[-1]["number"]
        print(f"{grown} steps at {steps['samples'] / steps['seconds']:,.0f} samples/s")
        print(f"servers: at most {run.peak / arguments.rows:.1f} bytes of memory for each row, a checkpoint included")
        full = size(run.run, saved)
        print(f"checkpoint of all rows: {full / 1e9:.2f} GB in {written(run, saved):.1f} s", flush=True)
        grow = run.run

        with Cluster(folder, "restored", job(1000, one_percent), servers=3, restore=grow) as run:
            run.until(lambda: run.records("began") or None)
            seconds = time.monotonic() - run.began
            first, changed, whole = run.until(lambda: run.records("checkpoint")[:3] if len(run.records("checkpoint")) > 2 else None)
            print(
                f"restored to three servers in {seconds:.1f} s, {written(run, first['number']):.1f} s of them to write the first "
                "checkpoint"
            )
            part = size(run.run, changed["number"])
            print(
                f"checkpoint after 1 %: {part / 1e6:.1f} MB, {part / full:.4f} of the bytes, "
                f"in {written(run, changed['number']):.1f} s",
                flush=True,
            )
            length = written(run, whole["number"])
            meanwhile = pace(run.records("steps"), whole["seconds"] - length, whole["seconds"])

        with Cluster(folder, "alone", job(1000, NEVER), servers=3, restore=grow) as run:
            warm = 5
            done = lambda: any(record["seconds"] > warm + length for record in run.records("steps")) or None
            run.until(done)
            alone = pace(run.records("steps"), warm, warm + length)
        print(
            f"training: {meanwhile:,.0f} samples/s while a checkpoint of all rows is written in {length:.1f} s, "
            f"{alone:,.0f} without: {meanwhile / alone:.2f}"
        )


main()
