#!/usr/bin/env python3
"""Writes stale.json beside this script: updates of one block by gradients of old weights, computed with NumPy in float64.

    pip install numpy
    python make_stale_vectors.py

The rules are those of `strategy.correction` in docs/strategies.md. A case has

    optimizer   as in a job file
    workers     how many compute
    initial     the weights before the first update
    updates     each with the version that its gradient is based on, the gradient, the factor of its step, the weights after it, their
                average over the last 5 updates, and the look-ahead weights (none without momentum)
"""

import json
import pathlib

import numpy as np

LIMIT = 0.05
WINDOW = 5
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
EXPONENT = {"ftrl": 1 / 2, "sgd": 1, "momentum": 1, "adagrad": 1 / 2, "rmsprop": 3 / 4, "adam": 3 / 4, "adamw": 3 / 4}


class Optimizer:
    def __init__(self, settings, count):
        self.o, self.t = settings, 0
        self.m, self.v = np.zeros(count), np.zeros(count)

    def step(self, w, g):
        """The change of the weights."""
        o, name, rate = self.o, self.o["name"], self.o["learning_rate"]
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
            self.v = self.v + g * g
            return -rate * g / (np.sqrt(self.v) + o["epsilon"])
        if name == "rmsprop":
            self.v = o["alpha"] * self.v + (1 - o["alpha"]) * g * g
            self.m = o["momentum"] * self.m + g / (np.sqrt(self.v) + o["epsilon"])
            return -rate * self.m
        self.m = o["beta1"] * self.m + (1 - o["beta1"]) * g
        self.v = o["beta2"] * self.v + (1 - o["beta2"]) * g * g
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
        last = np.linalg.norm(w), np.linalg.norm(d)
        drift = optimizer.drift(mean, w)
        w = w + factor * d
        if factor < 1:
            w = optimizer.shortened(w)
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


cases = [case(settings, workers, seed) for seed, settings in enumerate(OPTIMIZERS) for workers in (2, 8)]
place = pathlib.Path(__file__).with_name("stale.json")
rounded = json.loads(json.dumps(cases), parse_float=lambda text: float(f"{float(text):.9g}"))
place.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
for one in rounded:
    factors = [update["factor"] for update in one["updates"]]
    print(one["optimizer"]["name"], one["workers"], sum(f == 1 for f in factors), "whole steps of", len(factors), "least", min(factors))
