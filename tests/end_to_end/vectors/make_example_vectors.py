#!/usr/bin/env python3
"""Writes examples.safetensors beside this script, and the pretrained network
of examples/jobs/finetune.toml: the weights that PyTorch reaches in the jobs
accumulate, finetune and groups of examples/jobs.

    pip install torch numpy safetensors
    python make_example_vectors.py

Each step has all samples that are trained on, so their order does not matter.
digits_held_out.txt has the numbers of the others, as the program chooses them.
"""

import gzip
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, relu

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
HIDDEN, CLASSES, STEPS = 32, 10, 20
# A pixel's largest value.
DARKEST = 16.0


def training_samples():
    with gzip.open(ROOT / "crates/data/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    held_out = np.loadtxt(HERE / "digits_held_out.txt", dtype=int)
    rows = np.delete(rows, held_out, axis=0)
    inputs = torch.from_numpy(rows[:, :-1] / DARKEST)
    return inputs, torch.from_numpy(rows[:, -1]).long()


def initial(seed):
    """The values of two layers, as torch.nn.Linear begins."""
    torch.manual_seed(seed)
    layers = {
        "hidden.0": torch.nn.Linear(64, HIDDEN),
        "output": torch.nn.Linear(HIDDEN, CLASSES),
    }
    return {
        f"{layer}.{name}": value.detach().clone()
        for layer, module in layers.items()
        for name, value in module.named_parameters()
    }


def loss(values, inputs, labels):
    hidden = relu(inputs @ values["hidden.0.weight"].T + values["hidden.0.bias"])
    outputs = hidden @ values["output.weight"].T + values["output.bias"]
    return cross_entropy(outputs, labels)


def train(values, optimizer, samples, steps=STEPS):
    """Returns the values after full-batch steps. `optimizer` is made of the
    values that are trained."""
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    optimizer = optimizer(values)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(values, *samples).backward()
        optimizer.step()
    return {name: value.detach() for name, value in values.items()}


def decay_on_weights(values):
    biases = [value for name, value in values.items() if name.endswith(".bias")]
    weights = [value for name, value in values.items() if name.endswith(".weight")]
    groups = [
        {"params": weights, "weight_decay": 0.5},
        {"params": biases, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def last_layer(values):
    last = [values["output.weight"], values["output.bias"]]
    return torch.optim.Adam(last, lr=0.1)


def main():
    torch.set_num_threads(1)
    inputs, labels = samples = training_samples()
    begin = initial(1)
    low = labels < 5
    pretrained = train(
        initial(2),
        lambda values: torch.optim.Adam(values.values(), lr=0.01),
        (inputs[low], labels[low]),
        steps=100,
    )
    save_file(pretrained, ROOT / "examples/jobs/pretrained.safetensors")
    trained = {
        "accumulate": train(
            begin, lambda values: torch.optim.SGD(values.values(), lr=0.5), samples
        ),
        "finetune": train(pretrained, last_layer, samples),
        "groups": train(begin, decay_on_weights, samples),
    }
    vectors = {f"{job}.{name}": v for job, vs in trained.items() for name, v in vs.items()}
    save_file(vectors, HERE / "examples.safetensors")
    save_file(begin, HERE / "initial.safetensors")
    for job, values in trained.items():
        print(f"{job}: loss {loss(values, *samples).item():.4f}")


if __name__ == "__main__":
    main()
