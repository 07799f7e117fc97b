#!/usr/bin/env python3
"""Trains ResNet-20 as examples/jobs/resnet20.toml does, with PyTorch in one process.

    pip install torch numpy
    scripts/train-torch-resnet20.py FOLDER [--epochs N] [--threads N] [--seed N]

FOLDER has CIFAR-10's files data_batch*.bin and test_batch*.bin, or parts of them. Prints the accuracy after each epoch.
"""

import argparse
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

from torch_models import ResNet

MEAN = torch.tensor([0.491, 0.482, 0.447]).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.247, 0.243, 0.262]).view(1, 3, 1, 1)
BATCH = 128
CROP = 4


def read(folder, prefix):
    files = sorted(pathlib.Path(folder).glob(f"{prefix}*.bin"))
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    pictures = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255)
    return pictures, torch.from_numpy(records[:, 0].astype(np.int64))


def vary(pictures, random):
    """A window of each picture with zeros at its sides, mirrored or not."""
    padded = F.pad(pictures, [CROP] * 4)
    varied = torch.empty_like(pictures)
    for i, picture in enumerate(padded):
        down, right = random.integers(0, 2 * CROP + 1, 2)
        window = picture[:, down : down + 32, right : right + 32]
        varied[i] = window.flip(2) if random.integers(2) else window
    return varied


parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
torch.set_num_threads(options.threads)
torch.manual_seed(options.seed)
random = np.random.default_rng(options.seed)
pictures, labels = read(options.folder, "data_batch")
test_pictures, test_labels = read(options.folder, "test_batch")
model = ResNet(20, (3, 32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
steps = options.epochs * math.ceil(len(labels) / BATCH)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1))) / 2
)
began = time.perf_counter()
for epoch in range(1, options.epochs + 1):
    model.train()
    order = torch.from_numpy(random.permutation(len(labels)))
    for batch in order.split(BATCH):
        inputs = (vary(pictures[batch], random) - MEAN) / DEVIATION
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        outputs = [model((part - MEAN) / DEVIATION) for part in test_pictures.split(500)]
    right = (torch.cat(outputs).argmax(1) == test_labels).float().mean().item()
    print(f"epoch {epoch}: accuracy {right:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
