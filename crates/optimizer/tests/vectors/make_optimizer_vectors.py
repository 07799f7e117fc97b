#!/usr/bin/env python3
"""Writes optimizers.json beside this script: what the optimizers and the
learning-rate schedules of PyTorch, and the FTRL of Keras, do to 17 weights
over 25 updates.

    pip install torch tensorflow-cpu numpy
    python make_optimizer_vectors.py

The gradients are fixed random numbers and do not depend on the weights, so
that every update can be checked on its own. All arithmetic is float32 on the
CPU. A float32 is written with the fewest digits that give it back exactly.


FTRL
----
The update of keras.optimizers.Ftrl (keras/src/optimizers/ftrl.py), element by
element. State: n starts at initial_accumulator, z at 0. With lr the learning
rate, p = -learning_rate_power (0.5 as a rule), g the gradient, w the weight:

    l2'   = l2 + beta / (2 * lr)
    g'    = g + 2 * l2_shrinkage * w            (w before the update)
    n_new = n + g^2                             (g, not g')
    z     = z + g' - ((n_new^p - n^p) / lr) * w (w before the update)
    q     = n_new^p / lr + 2 * l2'
          = (n_new^p + beta) / lr + 2 * l2
    w     = (clamp(z, -l1, l1) - z) / q
    n     = n_new

So w = 0 when |z| <= l1, else w = (sign(z) * l1 - z) / q. To be noted:

  * l2 counts twice: q holds 2 * l2, where the paper (and the docstring of
    Keras) have l2 alone. beta counts once, as in the paper.
  * l2_shrinkage enters z through g', but not the accumulator n.
  * z starts at 0 whatever the initial weights are, and so the first update
    does not start from them. With l1, l2, l2_shrinkage and beta at 0 it gives
        w_1 = w_0 * (1 - (n_0 / n_1)^p) - lr * g / n_1^p,
    and a weight whose first gradient is 0 becomes exactly 0 (unless
    initial_accumulator is 0, where it becomes NaN: 0 / 0).
"""

import json
import math
import multiprocessing
import os
import platform
from importlib import metadata

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np

# PyTorch and TensorFlow do not always bear being loaded into one process (each
# brings an LLVM), so each is imported where it is used, and Keras runs in a
# process of its own.

SEED = 20240
WEIGHTS = 17
STEPS = 25
# This weight never gets a gradient other than 0.
ALWAYS_ZERO = 3
# These get 0 in the first update, and other gradients later.
ZERO_AT_FIRST = (7, 16)


# Settings, under the names that the file uses.

SGD = {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
MOMENTUM = {
    "name": "momentum",
    "learning_rate": 0.05,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
}
ADAGRAD = {
    "name": "adagrad",
    "learning_rate": 0.1,
    "initial_accumulator": 0.0,
    "epsilon": 1e-10,
    "weight_decay": 0.0,
}
RMSPROP = {
    "name": "rmsprop",
    "learning_rate": 0.01,
    "alpha": 0.99,
    "epsilon": 1e-8,
    "momentum": 0.0,
    "weight_decay": 0.0,
}
ADAM = {
    "name": "adam",
    "learning_rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "weight_decay": 0.0,
}
ADAMW = {**ADAM, "name": "adamw", "weight_decay": 0.01}
FTRL = {
    "name": "ftrl",
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "initial_accumulator": 0.1,
    "l1": 0.0,
    "l2": 0.0,
    "l2_shrinkage": 0.0,
    "beta": 0.0,
}

CASES = [
    ("sgd", SGD, None),
    ("sgd, weight decay", {**SGD, "weight_decay": 0.01}, None),
    ("momentum", MOMENTUM, None),
    ("nesterov", {**MOMENTUM, "nesterov": True}, None),
    (
        "nesterov, weight decay",
        {**MOMENTUM, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
        None,
    ),
    ("adagrad", ADAGRAD, None),
    (
        "adagrad, initial accumulator, weight decay",
        {**ADAGRAD, "initial_accumulator": 0.1, "weight_decay": 0.01},
        None,
    ),
    ("rmsprop", RMSPROP, None),
    (
        "rmsprop, momentum, weight decay",
        {**RMSPROP, "alpha": 0.95, "momentum": 0.9, "weight_decay": 0.01},
        None,
    ),
    ("adam", ADAM, None),
    (
        "adam, other betas, weight decay",
        {**ADAM, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.05},
        None,
    ),
    ("adamw, weight decay 0.01", ADAMW, None),
    ("adamw, weight decay 0.1", {**ADAMW, "weight_decay": 0.1}, None),
    ("ftrl", FTRL, None),
    ("ftrl, l1, l2", {**FTRL, "l1": 0.5, "l2": 0.3}, None),
    ("ftrl, l2 shrinkage, beta", {**FTRL, "l2_shrinkage": 0.05, "beta": 0.7}, None),
    (
        "ftrl, power -0.7, all settings",
        {
            **FTRL,
            "learning_rate_power": -0.7,
            "initial_accumulator": 0.2,
            "l1": 0.2,
            "l2": 0.1,
            "l2_shrinkage": 0.02,
            "beta": 0.4,
        },
        None,
    ),
    ("schedule: constant, warm-up", SGD, {"kind": "constant", "warmup_steps": 5}),
    (
        "schedule: step",
        SGD,
        {"kind": "step", "warmup_steps": 0, "step_every": 7, "step_factor": 0.5},
    ),
    (
        "schedule: cosine with a floor",
        SGD,
        {"kind": "cosine", "warmup_steps": 0, "total_steps": 25, "floor": 0.1},
    ),
    (
        "schedule: cosine, warm-up",
        SGD,
        {"kind": "cosine", "warmup_steps": 5, "total_steps": 25, "floor": 0.0},
    ),
    (
        "schedule: step, warm-up",
        SGD,
        {"kind": "step", "warmup_steps": 4, "step_every": 6, "step_factor": 0.3},
    ),
    ("adam, moving average", ADAM, None, 0.9),
    ("sgd, moving average", SGD, None, 0.99),
]


def random_case(index):
    """Initial weights and gradients, float32. Gradients lie between 1e-3 and 3
    in magnitude (even on a log scale), with either sign; some are exactly 0."""
    random = np.random.default_rng([SEED, index])
    initial = random.uniform(-1.0, 1.0, WEIGHTS).astype(np.float32)
    shape = (STEPS, WEIGHTS)
    magnitude = np.exp(random.uniform(math.log(1e-3), math.log(3.0), shape))
    sign = np.where(random.uniform(size=shape) < 0.5, -1.0, 1.0)
    gradients = (magnitude * sign).astype(np.float32)
    gradients[random.uniform(size=shape) < 0.08] = 0.0
    gradients[:, ALWAYS_ZERO] = 0.0
    gradients[0, ZERO_AT_FIRST] = 0.0
    return initial, gradients


def torch_optimizer(settings, parameter):
    import torch

    s = settings
    common = {
        "lr": s["learning_rate"],
        "weight_decay": s["weight_decay"],
        "foreach": False,
    }
    if s["name"] == "sgd":
        return torch.optim.SGD([parameter], **common)
    if s["name"] == "momentum":
        return torch.optim.SGD(
            [parameter],
            momentum=s["momentum"],
            dampening=0.0,
            nesterov=s["nesterov"],
            **common,
        )
    if s["name"] == "adagrad":
        return torch.optim.Adagrad(
            [parameter],
            initial_accumulator_value=s["initial_accumulator"],
            eps=s["epsilon"],
            **common,
        )
    if s["name"] == "rmsprop":
        return torch.optim.RMSprop(
            [parameter],
            alpha=s["alpha"],
            eps=s["epsilon"],
            momentum=s["momentum"],
            centered=False,
            **common,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[s["name"]]
    return kind(
        [parameter],
        betas=(s["beta1"], s["beta2"]),
        eps=s["epsilon"],
        amsgrad=False,
        **common,
    )


def torch_schedule(schedule, optimizer):
    """The schedule made of PyTorch's own schedulers."""
    from torch.optim import lr_scheduler as schedulers

    base = optimizer.param_groups[0]["lr"]
    warmup = schedule["warmup_steps"]
    parts = []
    if warmup > 0:
        # From 1/W at t = 0, by equal steps, to 1 at t = W - 1.
        parts.append(
            schedulers.LinearLR(
                optimizer, start_factor=1.0 / warmup, total_iters=warmup - 1
            )
        )
    if schedule["kind"] == "constant":
        # LinearLR stays at 1 after the warm-up.
        return parts[0]
    if schedule["kind"] == "step":
        parts.append(
            schedulers.StepLR(
                optimizer, schedule["step_every"], gamma=schedule["step_factor"]
            )
        )
    else:
        parts.append(
            schedulers.CosineAnnealingLR(
                optimizer,
                schedule["total_steps"] - warmup,
                eta_min=schedule["floor"] * base,
            )
        )
    if warmup == 0:
        return parts[0]
    return schedulers.SequentialLR(optimizer, parts, milestones=[warmup])


def factor(schedule, t):
    """The same schedule as a formula: what multiplies the learning rate at
    update number t, counted from 0."""
    warmup = schedule["warmup_steps"]
    if t < warmup:
        return (t + 1) / warmup
    t -= warmup
    if schedule["kind"] == "constant":
        return 1.0
    if schedule["kind"] == "step":
        return schedule["step_factor"] ** (t // schedule["step_every"])
    span = schedule["total_steps"] - warmup
    floor = schedule["floor"]
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * t / span)) / 2.0


def run_torch(settings, schedule, decay, initial, gradients):
    """The weights after each update, and their exponential moving averages if
    there is a decay."""
    import torch
    from torch.optim import swa_utils

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = torch_optimizer(settings, parameter)
    scheduler = torch_schedule(schedule, optimizer) if schedule else None
    model = torch.nn.ParameterList([parameter])
    if decay is not None:
        average = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay)
        )
    weights, averages = [], []
    for t, gradient in enumerate(gradients):
        if schedule:
            # PyTorch's schedulers and the formula must agree.
            expected = settings["learning_rate"] * factor(schedule, t)
            assert math.isclose(
                optimizer.param_groups[0]["lr"], expected, rel_tol=1e-12
            ), (schedule, t)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        if scheduler:
            scheduler.step()
        weights.append(parameter.detach().numpy().copy())
        if decay is not None:
            average.update_parameters(model)
            averages.append(average.module[0].detach().numpy().copy())
    return np.stack(weights), np.stack(averages) if averages else None


def run_keras_ftrl(settings, initial, gradients):
    import keras
    import tensorflow as tf

    s = settings
    optimizer = keras.optimizers.Ftrl(
        learning_rate=s["learning_rate"],
        learning_rate_power=s["learning_rate_power"],
        initial_accumulator_value=s["initial_accumulator"],
        l1_regularization_strength=s["l1"],
        l2_regularization_strength=s["l2"],
        l2_shrinkage_regularization_strength=s["l2_shrinkage"],
        beta=s["beta"],
    )
    variable = keras.Variable(initial, dtype="float32")
    optimizer.build([variable])
    weights = []
    with tf.device("/CPU:0"):
        for gradient in gradients:
            optimizer.apply([tf.constant(gradient)], [variable])
            weights.append(np.array(variable.numpy(), copy=True))
    return np.stack(weights)


def package_version(package):
    """The version installed. TensorFlow has several distributions."""
    names = [package, "tensorflow-cpu"] if package == "tensorflow" else [package]
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    raise SystemExit(f"{package} is not installed")


def number(value):
    """A float32 in the fewest digits that give it back exactly, also to a
    reader that goes through float64."""
    assert value.dtype == np.float32 and np.isfinite(value)
    text = str(value)
    assert np.float32(float(text)).tobytes() == value.tobytes()
    return text


def row(values):
    return "[" + ", ".join(number(value) for value in values) + "]"


def table(rows):
    return "[\n" + ",\n".join("        " + row(values) for values in rows) + "\n      ]"


def main():
    made_with = {"python": platform.python_version()}
    for package in ("numpy", "torch", "tensorflow", "keras"):
        made_with[package] = package_version(package)
    keras_process = multiprocessing.get_context("spawn").Pool(1)
    cases = []
    for index, (name, settings, schedule, *decay) in enumerate(CASES):
        decay = decay[0] if decay else None
        averages = None
        initial, gradients = random_case(index)
        if settings["name"] == "ftrl":
            weights = keras_process.apply(
                run_keras_ftrl, (settings, initial, gradients)
            )
        else:
            weights, averages = run_torch(
                settings, schedule, decay, initial, gradients
            )
        assert weights.dtype == np.float32 and weights.shape == (STEPS, WEIGHTS)
        cases.append(
            "    {\n"
            + f'      "name": {json.dumps(name)},\n'
            + f'      "optimizer": {json.dumps(settings)},\n'
            + f'      "schedule": {json.dumps(schedule)},\n'
            + f'      "ema_decay": {json.dumps(decay)},\n'
            + f'      "initial": {row(initial)},\n'
            + f'      "gradients": {table(gradients)},\n'
            + f'      "weights": {table(weights)},\n'
            + f'      "averages": {"null" if averages is None else table(averages)}\n'
            + "    }"
        )
    keras_process.close()
    keras_process.join()
    text = (
        "{\n"
        + f'  "made_with": {json.dumps(made_with)},\n'
        + '  "cases": [\n'
        + ",\n".join(cases)
        + "\n  ]\n}\n"
    )
    json.loads(text)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "optimizers.json"), "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    main()
