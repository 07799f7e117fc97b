#!/usr/bin/env python3
"""Trains many jobs in all modes, and compares how well bounded and async mode end with sync mode (docs/strategies.md).

    scripts/measure-quality.py RESULTS.jsonl                             # the whole grid of the small jobs, in simulated time
    scripts/measure-quality.py RESULTS.jsonl --cells digits:adam:0.01:8 digits:sgd:1:8
    scripts/measure-quality.py RESULTS.jsonl --program target/release/flambeau --cells ...   # real processes
    scripts/measure-quality.py RESULTS.jsonl --table --csv quality.csv   # prints the table of what is there, and writes it as CSV

A cell is JOB:OPTIMIZER:RATE:WORKERS. Each cell is trained in each mode with each seed. A run appends a line to the results: the last metrics, the losses of all
evaluations, and the largest of the last five. Runs that are there already are not repeated, so
that an interrupted measurement goes on. In simulated time (`cargo bench -p tests --bench quality`) the order of all updates follows from the job
and its seed, so that each run can be repeated exactly.
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"

DIGITS = """epochs = 20
batch_size = 32
[data]
kind = "digits"
[model]
name = "mlp"
hidden = [64]
"""

REGRESSION = """epochs = 20
batch_size = 32
[data]
kind = "csv"
dir = "{folder}/regression.csv"
label = "y"
target = "number"
held_out = 0.2
[model]
name = "mlp"
hidden = [32, 32]
"""

FASHION = """epochs = 3
batch_size = 64
[data]
kind = "fashion-mnist"
dir = "{shared}/fashion-mnist"
[model]
name = "{model}"
"""

MOVIES = """epochs = 5
batch_size = 256
[data]
kind = "csv"
dir = "{shared}/movielens-latest-small/ml-latest-small.zip/ratings.csv"
label = "rating"
target = "number"
held_out = 0.1
[data.columns]
userId = { type = "category" }
movieId = { type = "category" }
timestamp = { type = "ignore" }
[model]
name = "factorization-machine"
embedding = 8
"""

CLICKS = """epochs = 1
batch_size = 128
[data]
kind = "clicks"
[model]
name = "deepfm"
embedding = 8
hidden = [64, 32]
"""

CRITEO = """epochs = 1
batch_size = 64
[data]
kind = "criteo"
dir = "{shared}/criteo-10k/train.first10k.txt"
held_out = 0.2
[data.options]
buckets = 1000000
[model]
name = "deepfm"
embedding = 8
hidden = [64, 32]
"""

JOBS = {
    "digits": DIGITS,
    "regression": REGRESSION,
    "fashion": FASHION.replace("{model}", "mlp"),
    "fashion-cnn": FASHION.replace("{model}", "cnn"),
    "movies": MOVIES,
    "clicks": CLICKS,
    "criteo": CRITEO,
}

# A small rate, and a large one: the largest of 1, 2 and 5 with which sync mode still ends well with each number of workers.
RATES = {
    "digits": {"sgd": (0.1, 1), "momentum": (0.01, 0.1), "adagrad": (0.02, 0.1), "adam": (0.001, 0.01), "adamw": (0.001, 0.02), "ftrl": (0.1, 0.3)},
    "regression": {"sgd": (0.01, 0.1), "momentum": (0.001, 0.02), "adagrad": (0.02, 0.1), "adam": (0.001, 0.01), "adamw": (0.001, 0.02), "ftrl": (0.05, 0.2)},
}
LARGE_JOBS = ["fashion:adam:0.002", "fashion:momentum:0.05", "movies:adam:0.01", "clicks:adam:0.002", "criteo:adam:0.002"]

MODES = {
    "sync": 'mode = "sync"',
    "bounded": 'mode = "bounded"',
    "async": 'mode = "async"',
    "uncorrected": 'mode = "bounded"\ncorrection = { enabled = false }',
}


def grid():
    """All cells of the small jobs."""
    return [f"{job}:{optimizer}:{rate}:{workers}"
            for job, optimizers in RATES.items() for optimizer, rates in optimizers.items() for rate in rates for workers in (1, 2, 4, 8, 16)]


def large():
    """The stated part of the grid of the large jobs."""
    return [f"{job}:{workers}" for job in LARGE_JOBS for workers in (2, 8, 16)]


def make_regression(folder):
    """A product of two functions of a part of the columns each, with a little noise."""
    import random
    draw = random.Random(7)
    with open(folder / "regression.csv", "w") as file:
        file.write(",".join(f"x{index}" for index in range(8)) + ",y\n")
        for _ in range(2000):
            x = [draw.gauss(0, 1) for _ in range(8)]
            y = math.tanh(x[0] + 0.5 * x[1] - x[2]) * (1 + 0.5 * math.sin(x[3] * x[4])) + 0.3 * x[5] + draw.gauss(0, 0.05)
            file.write(",".join(f"{value:.5f}" for value in [*x, y]) + "\n")


def job_text(cell, mode, seed, extra, folder):
    job, optimizer, rate, workers = cell.split(":")
    body = JOBS[job].replace("{folder}", str(folder)).replace("{shared}", str(SHARED))
    tables = '\n[[tables]]\ntables = "*"\noptimizer = { name = "adagrad", learning_rate = 0.05 }\n' if job in ("clicks", "criteo") else ""
    head = "\n".join(line for line in extra if not line.startswith("strategy."))
    strategy = "\n".join(line.removeprefix("strategy.") for line in extra if line.startswith("strategy."))
    return f"""seed = {seed}
{head}
{body}
[optimizer]
name = "{optimizer}"
learning_rate = {rate}
{tables}
[strategy]
{MODES[mode]}
{strategy}
[cluster]
ps = 2
workers = {workers}
"""


def train(command, cell, mode, seed, arguments, folder):
    """Trains once. Returns the line of the results."""
    with tempfile.TemporaryDirectory() as run:
        run = pathlib.Path(run)
        (run / "job.toml").write_text(job_text(cell, mode, seed, arguments.set, folder))
        environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
        if arguments.program:
            call = [arguments.program, "train", run / "job.toml", "--run-dir", run / "run", "--quiet", "--json"]
            done = subprocess.run(call, capture_output=True, text=True)
            file = run / "run" / "metrics.jsonl"
            lines = file.read_text() if file.exists() else ""
        else:
            done = subprocess.run([*command, run / "job.toml"], capture_output=True, text=True, env=environment)
            lines = done.stdout
        records = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
        evaluations = [record["metrics"] for record in records if record.get("event") == "evaluation"]
        rose = any(record.get("event") == "loss_rose" for record in records)
        result = {"cell": cell, "mode": mode, "seed": seed, "set": arguments.set, "real": bool(arguments.program), "passes": len(evaluations), "rose": rose}
        errors = [record["error"] for record in records if record.get("error")]
        if done.returncode != 0 or not evaluations or errors:
            return {**result, "error": (errors or [done.stderr[-300:]])[0]}
        evaluations = [{name: finite(value) for name, value in metrics.items()} for metrics in evaluations]
        losses = [numbers["loss"] for numbers in evaluations]
        return {**result, "metrics": evaluations[-1], "late_loss": max(losses[-5:]), "losses": [round(loss, 5) for loss in losses]}


def finite(value):
    """A metric; infinity for one that is no number."""
    number = float("nan" if value is None else value)
    return float("inf") if math.isnan(number) else number


def key(result):
    return (result["cell"], result["mode"], result["seed"], tuple(result["set"]), result["real"])


def table(results):
    """Prints a line for each cell, and the share of cells that hold."""
    cells = {}
    for result in results:
        name = result["mode"] if result["mode"] in ("sync", "uncorrected") else " ".join([result["mode"], *result["set"]])
        cells.setdefault((result["cell"], result["real"]), {}).setdefault(name, []).append(result)
    names = sorted({name for runs in cells.values() for name in runs}, key=lambda name: (name != "sync", name != "uncorrected", name))
    held = {name: [] for name in names if name != "sync"}
    print("| job, optimizer, rate, workers | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for (cell, real), runs in cells.items():
        of = {name: summary(runs.get(name, [])) for name in names}
        sync, texts = of.get("sync"), []
        for name in names:
            own = of[name]
            if own is None:
                texts.append("")
                continue
            text = "failed" if own["failed"] else f"{own['loss']:.3f}"
            if own["accuracy"] is not None:
                text += f", {own['accuracy']:.3f}"
            # Where sync mode fails, there is nothing to compare with.
            if sync and name != "sync" and math.isfinite(sync["loss"]) and not sync["failed"]:
                holds = holds_beside(own, sync)
                held[name].append((holds, own["loss"] / sync["loss"]))
                text = text if holds else f"**{text}**"
            texts.append(text)
        print(f"| {cell.replace(':', ', ')}{', real' if real else ''} | " + " | ".join(texts) + " |")
    print()
    for name, all_cells in held.items():
        if all_cells:
            ratios = [ratio for _, ratio in all_cells]
            runs = [run for of_cell in cells.values() for run in of_cell.get(name, [])]
            failed, rose = ([run for run in runs if key in run and run[key]] for key in ("error", "rose"))
            print(f"{name}: {len(runs)} runs, of which {len(failed)} failed and {len(rose)} warned of a rising loss")
            print(f"{name}: {sum(holds for holds, _ in all_cells)} of {len(all_cells)} cells hold; loss / sync's: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


def write_csv(results, file):
    """Writes a line for each cell and mode."""
    cells = {}
    for result in results:
        cells.setdefault((result["cell"], result["real"]), {}).setdefault((result["mode"], " ".join(result["set"])), []).append(result)
    file.write("job,optimizer,rate,workers,processes,mode,settings,seeds,failed,loss,spread,worst_accuracy,late_loss,holds\n")
    for (cell, real), modes in sorted(cells.items()):
        sync = summary(modes.get(("sync", ""), []))
        for (mode, settings), runs in sorted(modes.items()):
            own = summary(runs)
            accuracy = "" if own["accuracy"] is None else f"{own['accuracy']:.4f}"
            holds = "" if mode == "sync" or not sync else str(holds_beside(own, sync)).lower()
            late = max((run["late_loss"] for run in runs if "error" not in run), default=float("inf"))
            row = [*cell.split(":"), "real" if real else "simulated", mode, settings, len(runs), sum("error" in run for run in runs), f"{own['loss']:.4f}", f"{own['spread']:.4f}", accuracy, f"{late:.4f}", holds]
            file.write(",".join(map(str, row)) + "\n")


def summary(runs):
    """The mean of the final losses, their spread, and the worst accuracy."""
    if not runs:
        return None
    done = [run for run in runs if "error" not in run]
    losses = [run["metrics"]["loss"] for run in done] or [float("inf")]
    accuracies = [run["metrics"]["accuracy"] for run in done if "accuracy" in run["metrics"]]
    return {"failed": len(done) < len(runs), "loss": statistics.mean(losses), "spread": max(losses) - min(losses), "accuracy": min(accuracies, default=None)}


def holds_beside(own, sync):
    """Whether a mode ends as well as sync mode: by the mean loss within the spread of its seeds, and by the worst accuracy within 0.01."""
    accurate = sync["accuracy"] is None or own["accuracy"] is not None and own["accuracy"] >= sync["accuracy"] - 0.01
    return not own["failed"] and own["loss"] <= sync["loss"] + sync["spread"] and accurate


def simulated():
    """Builds the simulation. Returns its command."""
    call = ["cargo", "bench", "-p", "tests", "--bench", "quality", "--no-run", "--message-format=json"]
    lines = subprocess.run(call, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    programs = [record["executable"] for record in map(json.loads, lines) if record.get("target", {}).get("name") == "quality"]
    return [programs[-1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--table", action="store_true", help="print the table of the results alone")
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="write the results of all cells there")
    parser.add_argument("--cells", nargs="*", help="JOB:OPTIMIZER:RATE:WORKERS; default: the whole grid of the small jobs; `large`: a part of the grid of the large ones")
    parser.add_argument("--modes", nargs="*", default=["sync", "bounded", "async"], choices=MODES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING", help="settings of bounded and async mode, as `ema_decay = 0.9` or `strategy.staleness = 2`")
    parser.add_argument("--program", help="train with the processes of this program in place of simulated time")
    parser.add_argument("--simulation", help="the program of the simulation, if it is built already")
    arguments = parser.parse_args()
    results = [json.loads(line) for line in arguments.results.read_text().splitlines()] if arguments.results.exists() else []
    if not arguments.table:
        there = {key(result) for result in results}
        cells = large() if arguments.cells == ["large"] else arguments.cells or grid()
        command = [] if arguments.program else [arguments.simulation] if arguments.simulation else simulated()
        with tempfile.TemporaryDirectory() as folder, open(arguments.results, "a") as file, concurrent.futures.ThreadPoolExecutor(1 if arguments.program else os.cpu_count()) as pool:
            make_regression(pathlib.Path(folder))
            runs = []
            for cell in cells:
                for mode in arguments.modes:
                    settings = [] if mode in ("sync", "uncorrected") else arguments.set
                    for seed in range(1, arguments.seeds + 1):
                        if (cell, mode, seed, tuple(settings), bool(arguments.program)) not in there:
                            own = argparse.Namespace(**{**vars(arguments), "set": settings})
                            runs.append(pool.submit(train, command, cell, mode, seed, own, folder))
            for number, run in enumerate(concurrent.futures.as_completed(runs), 1):
                result = run.result()
                results.append(result)
                print(json.dumps(result), file=file, flush=True)
                print(f"\r{number} of {len(runs)} runs", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
    table(results)
    if arguments.csv:
        with open(arguments.csv, "w") as file:
            write_csv(results, file)


if __name__ == "__main__":
    main()
