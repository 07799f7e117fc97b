#!/usr/bin/env python3
"""Writes stale.json beside this script: updates of blocks by gradients of old weights, computed with NumPy in float64.

    pip install numpy
    python make_stale_vectors.py

The rules are those of `strategy.correction` in docs/strategies.md. A case of a dense block (`dense`) has

    optimizer   as in a job file
    workers     how many compute
    initial     the weights before the first update
    updates     each with the version that its gradient is based on, the gradient, the factor of its step, the weights after it, their
                average over the last 5 updates, and the look-ahead weights (none without momentum)

A case of the rows of a bucket (`rows`), which begin with zeros, has

    optimizer   as in a job file
    updates     each with the version that its gradients are based on, the rows' ids, and the gradients of all values
    rows        the ids of all rows, and their values after the last update
"""

import json
import pathlib

import numpy as np

LIMIT = 0.05
WINDOW = 5
HISTORY = 32
ELEMENTS = 19
UPDATES = 12

OPTIMIZERS = [
    {"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.01},
    {"name": "momentum", "learning_rate": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    {"name": "momentum", "learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    {"name": "adagrad", "learning_rate": 0.1, "epsilon": 1e-10, "initial_accumulator": 0.0, "weight_decay": 0.0},
    {"name": "rmsprop", "learning_rate": 0.01, "alpha": 0.99, "epsilon": 1e-8, "momentum": 0.5, "weight_decay": 0.0},
    {"name": "adam", "learning_rate": 0.05, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0},
    {"name": "adamw", "learning_rate": 0.02, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.01},
    {"name": "ftrl", "learning_rate": 0.3, "learning_rate_power": -0.5, "initial_accumulator": 0.1, "beta": 0.2, "l1": 0.1, "l2": 0.01,
     "l2_shrinkage": 0.0},
]
ROW_OPTIMIZERS = [
    {"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.01},
    {"name": "adagrad", "learning_rate": 0.1, "epsilon": 1e-10, "initial_accumulator": 0.1, "weight_decay": 0.0},
    {"name": "adam", "learning_rate": 0.05, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0},
    {"name": "ftrl", "learning_rate": 0.3, "learning_rate_power": -0.5, "initial_accumulator": 0.1, "beta": 0.2, "l1": 0.1, "l2": 0.01,
     "l2_shrinkage": 0.0},
]
for row_wise in ("adagrad", "adam"):
    ROW_OPTIMIZERS.append({**next(one for one in ROW_OPTIMIZERS if one["name"] == row_wise), "name": f"row-{row_wise}"})
ROW_UPDATES = 100
ROWS = 24
DIMENSION = 2
ROW_EXPONENT = {"sgd": 1, "adagrad": 3 / 4, "adam": 3 / 4, "ftrl": 3 / 4, "row-adagrad": 3 / 4, "row-adam": 3 / 4}
EXPONENT = {"ftrl": 1 / 2, "sgd": 1, "momentum": 1, "adagrad": 1 / 2, "rmsprop": 3 / 4, "adam": 3 / 4, "adamw": 3 / 4}


class Optimizer:
    def __init__(self, settings, count):
        self.o, self.t = settings, 0
        self.name = settings["name"].removeprefix("row-")
        self.m, self.v = np.zeros(count), np.full(count, settings["initial_accumulator"] if self.name == "adagrad" else 0.0)

    def step(self, w, g):
        """The change of the weights."""
        o, name, rate = self.o, self.name, self.o["learning_rate"]
        # The row-wise forms have one sum or mean of squares for a row.
        squares = lambda g: np.mean(g * g) if o["name"] != name else g * g
        self.t += 1
        if name == "ftrl":
            before, self.v = self.v, self.v + g * g
            old, new = (np.sqrt(o["initial_accumulator"] + v) for v in (before, self.v))
            self.m = self.m + g - (new - old) / rate * w
            return np.where(np.abs(self.m) <= o["l1"], 0, (np.sign(self.m) * o["l1"] - self.m) / self.divisor()) - w
        if name != "adamw":
            g = g + o["weight_decay"] * w
        if name == "sgd":
            return -rate * g
        if name == "momentum":
            self.m = o["momentum"] * self.m + g
            return -rate * (g + o["momentum"] * self.m if o["nesterov"] else self.m)
        if name == "adagrad":
            self.v = self.v + squares(g)
            return -rate * g / (np.sqrt(self.v) + o["epsilon"])
        if name == "rmsprop":
            self.v = o["alpha"] * self.v + (1 - o["alpha"]) * g * g
            self.m = o["momentum"] * self.m + g / (np.sqrt(self.v) + o["epsilon"])
            return -rate * self.m
        self.m = o["beta1"] * self.m + (1 - o["beta1"]) * g
        self.v = o["beta2"] * self.v + (1 - o["beta2"]) * squares(g)
        decay = rate * o["weight_decay"] * w if name == "adamw" else 0
        return -rate * self.direction() - decay

    def divisor(self):
        """FTRL's."""
        o = self.o
        return np.sqrt(o["initial_accumulator"] + self.v) / o["learning_rate"] + o["beta"] / o["learning_rate"] + 2 * o["l2"]

    def shortened(self, w):
        """The weights after a shortened step, with which the state agrees."""
        if self.o["name"] != "ftrl":
            return w
        is_zero = np.abs(self.m) <= self.o["l1"]
        self.m = np.where(is_zero, self.m, -w * self.divisor() - np.sign(w) * self.o["l1"])
        return np.where(is_zero, 0, w)

    def direction(self):
        """Adam's, by the moments as they are."""
        o = self.o
        root = np.sqrt(self.v / (1 - o["beta2"] ** self.t))
        return self.m / (1 - o["beta1"] ** self.t) / (root + o["epsilon"])

    def drift(self, updates, w):
        """The steps of the next updates if they have no gradient; a part of an update has this part of its step. AdamW's decay goes on as in
        the last step."""
        o, name = self.o, self.o["name"]
        if name not in ("momentum", "rmsprop", "adam", "adamw"):
            return None
        m, total, number = self.m.copy(), np.zeros_like(self.m), 0
        root = None if "beta2" not in o else np.sqrt(self.v / (1 - o["beta2"] ** self.t)) + o["epsilon"]
        while updates > 0:
            number += 1
            m = o.get("momentum", o.get("beta1")) * m
            step = -o["learning_rate"] * m
            if name == "momentum" and o["nesterov"]:
                step = step * o["momentum"]
            if root is not None:
                step = step / (1 - o["beta1"] ** (self.t + number)) / root
                if name == "adamw":
                    share = o["beta1"] ** number * (1 - o["beta1"] ** self.t) / (1 - o["beta1"] ** (self.t + number))
                    step = step - share * o["learning_rate"] * o["weight_decay"] * w
            total += min(updates, 1) * step
            updates -= 1
        return total


def case(settings, workers, seed):
    draw = np.random.default_rng(seed)
    initial = draw.normal(0, 1, ELEMENTS).astype("f4")
    w, optimizer, mean = initial.astype("f8"), Optimizer(settings, ELEMENTS), workers - 1.0
    updates, last, average = [], None, np.zeros(ELEMENTS)
    limit = LIMIT * np.sqrt(1 - settings.get("momentum", settings.get("beta1", 0)))
    for version in range(UPDATES):
        based_on = max(0, version - int(draw.integers(0, 2 * workers)))
        # Some are so small that their step is not shortened.
        g = (draw.normal(0, 1, ELEMENTS) * draw.choice([0.001, 0.1, 3])).astype("f4")
        mean += (min(version - based_on, 4 * workers) - mean) / (2 * workers)
        flight = max(workers, 1 + mean)
        d = optimizer.step(w, g.astype("f8"))
        # By the step before; the first one has its share.
        allowed = 0 if last is None else limit * last[0] / (flight * last[1])
        factor = min(1.0, max(allowed, flight ** -EXPONENT[settings["name"]]))
        drift = optimizer.drift(mean, w)
        before, w = w, w + factor * d
        if factor < 1:
            w = optimizer.shortened(w)
        last = np.linalg.norm(before), np.linalg.norm(w - before) / factor
        # Weights that l1 sets to 0 are not averaged.
        average = w if settings.get("l1") else average + (w - average) / min(version + 1, WINDOW)
        numbers = lambda values: [float(f"{value:.7g}") for value in values]
        updates.append({
            "based_on": based_on,
            "gradient": [float(value) for value in g],
            "factor": float(factor),
            "weights": numbers(w),
            "average": numbers(average),
            "look_ahead": None if drift is None else numbers(w + factor * drift),
        })
    return {"optimizer": settings, "workers": workers, "initial": [float(x) for x in initial], "updates": updates}


def case_of_rows(settings, seed):
    draw = np.random.default_rng(seed)
    values, optimizers, changed, updates = {}, {}, {}, []
    for version in range(ROW_UPDATES):
        # Many gradients of the first rows are under way at a time. Some are older than the updates that a server tells apart.
        based_on = max(0, version - int(draw.choice([draw.integers(0, 12), 80], p=[0.9, 0.1])))
        # The first update has all rows: a server remembers as many as an update has.
        ids = sorted({int(id) for id in draw.zipf(1.3, 6) if id < ROWS}) if version > 0 else list(range(ROWS))
        gradients = draw.normal(0, 1, (len(ids), DIMENSION)).astype("f4")
        for id, g in zip(ids, gradients):
            w = values.setdefault(id, np.zeros(DIMENSION))
            optimizer = optimizers.setdefault(id, Optimizer(settings, DIMENSION))
            since = max(based_on, version - HISTORY)
            staleness = sum(since <= other for other in changed.setdefault(id, []))
            # Updates that a server no longer knows are taken to have changed the row as often.
            staleness *= max(1, (version - based_on) / HISTORY)
            factor = (1 + staleness) ** -ROW_EXPONENT[settings["name"]]
            changed[id].append(version)
            w = w + factor * optimizer.step(w, g.astype("f8"))
            values[id] = optimizer.shortened(w) if factor < 1 else w
        updates.append({"based_on": based_on, "ids": ids, "gradients": [float(value) for value in gradients.flat]})
    rows = [[id, [float(f"{value:.7g}") for value in w]] for id, w in sorted(values.items())]
    return {"optimizer": settings, "updates": updates, "rows": rows}


cases = {
    "dense": [case(settings, workers, seed) for seed, settings in enumerate(OPTIMIZERS) for workers in (2, 8)],
    "rows": [case_of_rows(settings, seed) for seed, settings in enumerate(ROW_OPTIMIZERS)],
}
place = pathlib.Path(__file__).with_name("stale.json")
rounded = json.loads(json.dumps(cases), parse_float=lambda text: float(f"{float(text):.9g}"))
place.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
for one in rounded["dense"]:
    factors = [update["factor"] for update in one["updates"]]
    print(one["optimizer"]["name"], one["workers"], sum(f == 1 for f in factors), "whole steps of", len(factors), "least", min(factors))
