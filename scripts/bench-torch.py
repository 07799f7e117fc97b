#!/usr/bin/env python3
"""The training steps of `flambeau bench models` with PyTorch, in samples per second.

    pip install torch
    scripts/bench-torch.py [MODEL ...] [--seconds N] [--threads N]
    cargo build --release && scripts/bench-torch.py --turns 5 [...]

With --turns, it measures each model with Flambeau and with PyTorch in turns, and prints the medians and their ratio.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F

from torch_models import CLASSES, Cnn, MobileNetV2, Mlp, ResNet, Transformer

# The step's samples, and the shape of each.
MODELS = {
    "mlp": (Mlp, 64, (1, 28, 28)),
    "cnn": (Cnn, 64, (1, 28, 28)),
    "resnet20": (functools.partial(ResNet, 20), 128, (3, 32, 32)),
    "resnet56": (functools.partial(ResNet, 56), 128, (3, 32, 32)),
    "resnet18": (functools.partial(ResNet, 18), 32, (3, 32, 32)),
    "resnet50": (functools.partial(ResNet, 50), 32, (3, 32, 32)),
    "mobilenetv2": (MobileNetV2, 32, (3, 32, 32)),
    "transformer": (Transformer, 32, (64, 128)),
}


def measure(build, batch, shape, seconds):
    torch.manual_seed(0)
    model = build(shape=shape)
    inputs = torch.randn(batch, *shape)
    targets = torch.arange(batch) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(3):
        step()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    times.sort()
    return batch / times[len(times) // 2]


def flambeau(name, seconds, threads):
    program = pathlib.Path(__file__).parent.parent / "target" / "release" / "flambeau"
    settings = [f"--seconds={seconds}", f"--threads={threads}", "--json"]
    command = [program, "bench", "models", name, *settings]
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    return json.loads(printed)["rows"][0]["samples_per_second"]


def in_turns(name, options):
    pairs = []
    for _ in range(options.turns):
        ours = flambeau(name, options.seconds, options.threads)
        pairs.append((ours, measure(*MODELS[name], options.seconds)))
    ours, theirs = (statistics.median(values) for values in zip(*pairs))
    ratios = [ours / theirs for ours, theirs in pairs]
    between = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"| {name} | {ours:.0f} | {theirs:.0f} | {statistics.median(ratios):.2f} ({between}) |", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("models", nargs="*", default=list(MODELS))
parser.add_argument("--seconds", type=float, default=5)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--turns", type=int, default=0)
options = parser.parse_args()
torch.set_num_threads(options.threads)
if options.turns:
    print(f"| model, {options.threads} threads | Flambeau, samples/s | PyTorch {torch.__version__} | ratio |")
    print("| --- | --- | --- | --- |")
for name in options.models:
    if options.turns:
        in_turns(name, options)
        continue
    print(f"{name} {measure(*MODELS[name], options.seconds):.0f} samples/s", flush=True)
