#!/usr/bin/env python3
"""The training steps of `RAYON_NUM_THREADS=1 cargo bench -p nn` with PyTorch, in samples per second.

    pip install torch
    scripts/bench-torch.py [MODEL ...] [--seconds N] [--threads N]
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 7 * 7, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))


def normalized(inputs, outputs, kernel, stride=1, groups=1, activation=None):
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([activation(inplace=True)] if activation else []))


class ResNet20(nn.Module):
    """He and others, 2015, section 4.2, with 1x1 convolutions where the size changes."""

    def __init__(self):
        super().__init__()
        self.first = normalized(3, 16, 3, activation=nn.ReLU)
        self.blocks, self.shortcuts = nn.ModuleList(), nn.ModuleList()
        channels = 16
        for stage, width in enumerate([16, 32, 64]):
            for block in range(3):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(
                    nn.Sequential(
                        normalized(channels, width, 3, stride, activation=nn.ReLU),
                        normalized(width, width, 3),
                    )
                )
                self.shortcuts.append(
                    normalized(channels, width, 1, 2) if stride > 1 else nn.Identity()
                )
                channels = width
        self.output = nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x)
        for block, shortcut in zip(self.blocks, self.shortcuts):
            x = F.relu(block(x) + shortcut(x), inplace=True)
        return self.output(x.mean((2, 3)))


class MobileNetV2(nn.Module):
    """Sandler and others, 2018, for pictures of 32x32: the first two strides are 1."""

    STAGES = [
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]

    def __init__(self):
        super().__init__()
        self.first = normalized(3, 32, 3, activation=nn.ReLU6)
        self.blocks = nn.ModuleList()
        self.residual = []
        channels = 32
        for expansion, width, count, stride in self.STAGES:
            for block in range(count):
                step = stride if block == 0 else 1
                inner = channels * expansion
                layers = [
                    normalized(inner, inner, 3, step, inner, nn.ReLU6),
                    normalized(inner, width, 1),
                ]
                if expansion > 1:
                    layers.insert(0, normalized(channels, inner, 1, activation=nn.ReLU6))
                self.blocks.append(nn.Sequential(*layers))
                self.residual.append(step == 1 and channels == width)
                channels = width
        self.last = normalized(320, 1280, 1, activation=nn.ReLU6)
        self.output = nn.Linear(1280, 10)

    def forward(self, x):
        x = self.first(x)
        for block, residual in zip(self.blocks, self.residual):
            x = x + block(x) if residual else block(x)
        return self.output(self.last(x).mean((2, 3)))


class Transformer(nn.Module):
    """An encoder with normalisation first, over sequences of vectors of 128, whose mean is classified."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(128, 10)

    def forward(self, x):
        return self.output(self.layers(x).mean(1))


MODELS = {
    "cnn": (Cnn, 64, (1, 28, 28)),
    "resnet20": (ResNet20, 128, (3, 32, 32)),
    "mobilenetv2": (MobileNetV2, 32, (3, 32, 32)),
    "transformer": (Transformer, 32, (64, 128)),
}


def measure(build, batch, shape, seconds):
    torch.manual_seed(0)
    model = build()
    inputs = torch.randn(batch, *shape)
    targets = torch.arange(batch) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(3):
        step()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
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
    print(f"{name} {measure(build, batch, shape, options.seconds):.0f} samples/s")
