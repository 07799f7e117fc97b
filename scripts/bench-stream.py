#!/usr/bin/env python3
"""The pace of training on data eight times the worker's memory limit, and on data that fits.

    cargo build --release && scripts/bench-stream.py [--mebibytes 256] [--turns 3]

Lines like Criteo's are written to a folder that is removed afterwards. The worker runs in a control group of Linux with
the limit, which takes root. Both jobs train on as many samples; the one that fits does so in several passes, from memory.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAMBEAU = Path(__file__).parent.parent / "target" / "release" / "flambeau"
GROUP = Path("/sys/fs/cgroup/memory/flambeau-bench-stream")
GROUP_V2 = Path("/sys/fs/cgroup/flambeau-bench-stream")
BLOCK = 1 << 25


def lines(seed):
    """About 32 MiB of lines."""
    draw = random.Random(seed)
    written, texts = 0, []
    while written < BLOCK:
        fields = [str(draw.randint(0, 1))]
        fields += [str(draw.randint(0, 500)) for _ in range(13)]
        fields += [f"{int(draw.paretovariate(0.2)) % (1 << 32):08x}" for _ in range(26)]
        texts.append("\t".join(fields) + "\n")
        written += len(texts[-1])
    return "".join(texts).encode()


def limited(mebibytes):
    """A group of processes that together have so much memory: the file to enter it by."""
    second = not Path("/sys/fs/cgroup/memory").is_dir()
    group = GROUP_V2 if second else GROUP
    group.mkdir(exist_ok=True)
    limit = "memory.max" if second else "memory.limit_in_bytes"
    (group / limit).write_text(str(mebibytes << 20))
    return group / "cgroup.procs"


def train(folder, job, procs):
    """Runs a job with one server and one worker; returns samples a second, and the mebibytes that the worker held at most."""
    run = Path(tempfile.mkdtemp(dir=folder))
    (run / "job.toml").write_text(job)
    log = open(run / "log", "w")
    start = lambda *command, **more: subprocess.Popen(command, stdout=log, stderr=log, **more)
    port = random.randint(20000, 30000)
    address = f"127.0.0.1:{port}"
    none = "127.0.0.1:0"
    coordinator = start(
        FLAMBEAU, "coordinator", run / "job.toml", "--listen", address,
        "--run-dir", run / "run", "--metrics-listen", none,
    )
    ps = start(FLAMBEAU, "ps-server", "--coordinator", address, "--listen", none, "--metrics-listen", none)
    enter = lambda: procs.write_text(str(os.getpid()))
    worker = start(FLAMBEAU, "worker", "--coordinator", address, "--metrics-listen", none, preexec_fn=enter)
    while coordinator.poll() is None:
        # One that is killed for its memory is not waited for here, so that its use can be asked for below.
        if os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            try:
                coordinator.wait(30)
            except subprocess.TimeoutExpired:
                coordinator.kill()
        time.sleep(0.1)
    code = coordinator.returncode
    if code:
        worker.kill()
        ps.kill()
    _, status, used = os.wait4(worker.pid, 0)
    codes = [os.waitstatus_to_exitcode(status), ps.wait(), code]
    if any(codes):
        sys.exit(f"worker, server and coordinator ended with {codes}:\n{(run / 'log').read_text()[-3000:]}")
    return json.loads((run / "run" / "summary.json").read_text())["samples_per_second"], used.ru_maxrss >> 10


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--mebibytes", type=int, default=256, help="the worker's memory limit")
    arguments.add_argument("--turns", type=int, default=3)
    arguments = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        blocks = arguments.mebibytes * 8 * (1 << 20) // BLOCK
        written = [lines(seed) for seed in range(1, 5)]
        held_out = lines(0)[: 1 << 20].rsplit(b"\n", 1)[0] + b"\n"
        for name, count in [("large", blocks), ("fits", 1)]:
            (folder / name).mkdir()
            (folder / name / "test.tsv").write_bytes(held_out)
            with open(folder / name / "train.tsv", "wb") as file:
                for block in range(count):
                    file.write(written[block % len(written)])
        job = lambda name, epochs, stream: f"""
            name = "{name}"
            epochs = {epochs}
            batch_size = 1024
            [data]
            kind = "criteo"
            dir = "{folder / name}"
            stream = {stream}
            shuffle_mebibytes = 32
            [data.options]
            train = "train.tsv"
            test = "test.tsv"
            buckets = 10000
            [model]
            name = "mlp"
            hidden = [256, 128]
            embedding = 8
            [optimizer]
            name = "adagrad"
            [strategy]
            mode = "async"
            [checkpoint]
            enabled = false
        """
        procs = limited(arguments.mebibytes)
        ratios = []
        for turn in range(arguments.turns):
            fits, fits_used = train(folder, job("fits", blocks, "false"), procs)
            large, large_used = train(folder, job("large", 1, "true"), procs)
            ratios.append(large / fits)
            print(
                f"turn {turn + 1}: {fits:,.0f} samples/s from memory ({fits_used} MiB), "
                f"{large:,.0f} streamed ({large_used} MiB)",
                flush=True,
            )
        data = arguments.mebibytes * 8
        print(f"{data} MiB of data, limit {arguments.mebibytes} MiB: ratio {statistics.median(ratios):.3f} (median)")
        time.sleep(0.5)
        procs.parent.rmdir()


main()
