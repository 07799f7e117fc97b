#!/usr/bin/env python3
"""Real tables as they ship in packages of Python, from `data describe` to predictions, beside scikit-learn's plain models.

    pip install numpy pandas scikit-learn statsmodels vega_datasets
    FLAMBEAU_PROGRAM=target/release/flambeau scripts/real-tables.py [--keep FOLDER] [--seeds 3] [TABLE...]

Each table takes four commands: `data describe --write`, `train`, `eval` and `predict`; no file is edited. scikit-learn
gets the columns of the job: numbers with the mean in gaps, standardised; categories as indicators; dates as days.
A figure is the mean over the seeds 1, 2 and so on; each chooses the fifth of the rows that is held out, the same rows
for all models. `constant` always predicts the mean or the most frequent label. (!) marks a figure far below
scikit-learn's. Remarks follow the table.
"""
import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from pathlib import Path

import numpy
import pandas
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, roc_auc_score, root_mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "conformance"))
from order import permutation  # noqa: E402

PROGRAM = Path(os.environ.get("FLAMBEAU_PROGRAM", "target/release/flambeau")).resolve()

# Name, package, file, label, and how pandas reads the file.
TABLES = [
    ("anes96", "statsmodels", "datasets/anes96/anes96.csv", "'vote'", {"sep": "\t", "quoting": 3}),
    ("modechoice", "statsmodels", "datasets/modechoice/modechoice.csv", "choice", {"sep": ";"}),
    ("framing", "statsmodels", "stats/tests/results/framing.csv", "cong_mesg", {"index_col": 0}),
    ("birth weights", "statsmodels", "treatment/tests/results/cataneo2.csv", "mbsmoke", {}),
    ("insurance", "statsmodels", "sandbox/regression/tests/racd10data_with_transformed.csv", "private", {}),
    ("programmes", "statsmodels", "multivariate/tests/results/mvreg.csv", "prog", {}),
    ("seattle-weather", "vega_datasets", "_data/seattle-weather.csv", "weather", {}),
    ("la-riots", "vega_datasets", "_data/la-riots.csv", "race", {}),
    ("iris", "sklearn", "datasets/data/iris.csv", "virginica", {}),
    ("wine", "sklearn", "datasets/data/wine_data.csv", "class", {}),
    ("co2", "statsmodels", "datasets/co2/co2.csv", "co2", {}),
    ("fair", "statsmodels", "datasets/fair/fair.csv", "affairs", {}),
    ("doctor visits", "statsmodels", "datasets/randhie/randhie.csv", "mdvis", {}),
    ("fertility", "statsmodels", "datasets/fertility/fertility.csv", "2010", {}),
    ("danish money", "statsmodels", "datasets/danish_data/data.csv", "lrm", {"encoding": "utf-8-sig"}),
    ("pigs", "statsmodels", "regression/tests/results/dietox.csv", "Weight", {}),
    ("airports", "vega_datasets", "_data/airports.csv", "latitude", {}),
    ("us-employment", "vega_datasets", "_data/us-employment.csv", "nonfarm", {}),
    ("stocks", "vega_datasets", "_data/stocks.csv", "price", {}),
    ("seattle-temps", "vega_datasets", "_data/seattle-temps.csv", "temp", {}),
    ("breast cancer", "sklearn", "datasets/data/breast_cancer.csv", "benign", {}),
    ("diabetes", "sklearn", "datasets/data/diabetes_data_raw.csv.gz", "9", {"sep": " ", "header": None}),
]
HELD_OUT = 0.2


class Refused(Exception):
    """A command ended with an error."""


def flambeau(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        command = next(part for part in arguments if part != "data")
        raise Refused(f"{command}: {done.stderr.strip()}")
    return done.stdout, done.stderr


def file_of(package, path):
    root = importlib.util.find_spec(package)
    if root is None:
        sys.exit(f"pip install {package}")
    return Path(root.origin).parent / path


def form_of(reading):
    """The options of `data describe` for a file that pandas reads with these."""
    form = ["--no-header"] if reading.get("header", 0) is None else []
    return form + ["--delimiter", reading["sep"]] if reading.get("sep") == " " else form


def learn(file, label, form, folder, seeds):
    """The four commands. Returns the job, the metrics, the number of predictions, the seconds of a training, and what was noticed."""
    job, notes, all_metrics = folder / "job.toml", [], []
    described, _ = flambeau("data", "describe", file, *form, "--label", label, "--write", job)
    (folder / "described").write_text(described)
    began = time.monotonic()
    runs = [folder / f"run-{seed}" for seed in range(1, seeds + 1)]
    trained = [flambeau("train", job, "--run-dir", run, "--seed", seed, "--quiet", "--json") for seed, run in enumerate(runs, 1)]
    seconds = (time.monotonic() - began) / seeds
    for run, (summary, said) in zip(runs, trained):
        notes += [line for line in said.splitlines() if "WARN" in line or "warning" in line]
        metrics = json.loads(flambeau("eval", run, "--json")[0])["metrics"]
        if metrics != json.loads(summary)["metrics"]:
            notes.append("eval differs from the end of train")
        notes += [f"{name} is {value}" for name, value in metrics.items() if value is None or not numpy.isfinite(value)]
        all_metrics.append(metrics)
    out = folder / "predictions.csv"
    flambeau("predict", runs[0], "--data-dir", file, "--out", out)
    predicted = pandas.read_csv(out)
    if predicted.isna().any().any():
        notes.append("a prediction is missing or NaN")
    means = {name: numpy.mean([metrics[name] for metrics in all_metrics]) for name in all_metrics[0]}
    return tomllib.loads(job.read_text()), means, len(predicted), seconds, list(dict.fromkeys(notes))


def plain(file, job, reading, seeds):
    """The figures of scikit-learn's plain model and of a constant, as the metric of the job's target."""
    data = job["data"]
    table = pandas.read_csv(file, **reading)
    table = table[[name for name in table.columns if name and not str(name).startswith("Unnamed: ")]]
    table.columns = [str(name).strip() for name in table.columns]
    label, target = data["label"], data["target"]
    table = table[table[label].notna()]
    kinds = {name: data.get("columns", {}).get(name, {"type": "number"})["type"] for name in table.columns if name != label}
    named = lambda kind: [name for name, own in kinds.items() if own == kind]
    for name in named("date"):
        table[name] = (pandas.to_datetime(table[name]) - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    numbers, categories = named("number") + named("date"), named("category") + named("id")
    for name in numbers:
        table[name] = table[name].astype(float)
    numeric = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    columns = make_column_transformer((numeric, numbers), (OneHotEncoder(handle_unknown="ignore"), categories))
    is_number = target == "number"
    model = make_pipeline(columns, LinearRegression() if is_number else LogisticRegression(max_iter=5000))
    constant = DummyRegressor() if is_number else DummyClassifier()
    inputs = table[[*numbers, *categories]].astype({name: str for name in categories})
    labels = table[label].astype(float) if is_number else table[label].astype(str)
    figures = {"model": [], "constant": []}
    held_out = math.ceil(len(inputs) * HELD_OUT)
    for seed in range(1, seeds + 1):
        # As the program holds samples out (crates/data/src/shuffle.rs).
        rows = permutation(seed, 0, 1, len(inputs))
        train, test = rows[:-held_out], rows[-held_out:]
        for name, one in [("model", model), ("constant", constant)]:
            one.fit(inputs.iloc[train], labels.iloc[train])
            true, predicted = labels.iloc[test], one.predict(inputs.iloc[test])
            if is_number:
                figure = root_mean_squared_error(true, predicted)
            elif target == "binary" and true.nunique() == 2:
                figure = roc_auc_score(true == one.classes_[1], one.predict_proba(inputs.iloc[test])[:, 1])
            else:
                figure = accuracy_score(true, predicted)
            figures[name].append(figure)
    return len(table), numpy.mean(figures["model"]), numpy.mean(figures["constant"])


def is_far_below(metric, own, other):
    return own > 1.25 * other + 1e-9 if metric == "rmse" else own < other - 0.05


def shown(number):
    return "-" if number is None else f"{number:.4g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--keep", type=Path, help="the folder for jobs, runs and predictions")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as own:
        results(options, Path(options.keep or own))


def results(options, place):
    rows, remarks = [], []
    print("| table | rows | model | metric | Flambeau | scikit-learn | constant | seconds |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for name, package, path, label, reading in TABLES:
        if options.tables and name not in options.tables:
            continue
        folder = place / re.sub(r"\W", "-", name)
        folder.mkdir(parents=True, exist_ok=True)
        file = file_of(package, path)
        try:
            job, metrics, predicted, seconds, notes = learn(file, label, form_of(reading), folder, options.seeds)
        except Refused as error:
            print(f"| {name} | | | | refused | | | |", flush=True)
            remarks.append(f"{name}: {str(error).replace(str(file.parent) + '/', '')[:600]}")
            continue
        metric = {"binary": "auc", "class": "accuracy", "number": "rmse"}[job["data"]["target"]]
        count, other, constant = plain(file, job, reading, options.seeds)
        far = is_far_below(metric, metrics[metric], other)
        mark = " (!)" if far else ""
        model = job["model"]["name"]
        print(f"| {name} | {count} | {model} | {metric} | {shown(metrics[metric])}{mark} | {shown(other)} | {shown(constant)} | {seconds:.1f} |",
              flush=True)
        if far and is_far_below(metric, metrics[metric], constant):
            notes.append(f"{metric} is far below that of a constant")
        if predicted < count:
            notes.append(f"{predicted} predictions for {count} rows")
        remarks += [f"{name}: {note}" for note in notes]
    print("\n" + "\n".join(remarks))


if __name__ == "__main__":
    main()
