#!/usr/bin/env python3
"""The training steps of `flambeau bench models` with PyTorch, in samples per second.

    pip install torch
    scripts/bench-torch.py [MODEL ...] [--seconds N] [--threads N]
"""

import argparse
import functools
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


parser = argparse.ArgumentParser()
parser.add_argument("models", nargs="*", default=list(MODELS))
parser.add_argument("--seconds", type=float, default=5)
parser.add_argument("--threads", type=int, default=1)
options = parser.parse_args()
torch.set_num_threads(options.threads)
for name in options.models:
    build, batch, shape = MODELS[name]
    print(f"{name} {measure(build, batch, shape, options.seconds):.0f} samples/s", flush=True)
