#!/usr/bin/env python3
"""Writes digests.json beside this script: larger models, trained by PyTorch for some steps of plain SGD.

    pip install torch numpy
    python make_model_digests.py

Initial values, samples and labels follow from names by a hash (`values` here, and in tests/digests.rs), so that they need
no file. Of each tensor there are two numbers: its norm, and its product with a vector of such values. All arithmetic is
float64 on the CPU: dozens of normalised layers amplify rounding errors a millionfold. Each step has one batch; the loss is
the mean cross entropy, the learning rate 0.0001. With larger steps, the deepest models amplify even errors of float64.

A model has

    losses       of each step, before its update
    gradients    of the first step, by variable: norm and product
    final        the variables after the last step, running statistics among them
    outputs      of the first batch in evaluation, after the last step
"""

import functools
import json
import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F

here = pathlib.Path(__file__).resolve().parent
sys.path.append(str(here.parents[3] / "scripts"))
from torch_models import CLASSES, MobileNetV2, ResNet, Transformer  # noqa: E402

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

LEARNING_RATE = 1e-4

# Name, model, steps, samples in a batch, shape of a sample.
MODELS = [
    ("resnet20", functools.partial(ResNet, 20), 20, 8, (3, 16, 16)),
    ("resnet56", functools.partial(ResNet, 56), 20, 4, (3, 16, 16)),
    ("resnet18", functools.partial(ResNet, 18), 4, 2, (3, 64, 64)),
    ("resnet34", functools.partial(ResNet, 34), 4, 4, (3, 16, 16)),
    ("resnet50", functools.partial(ResNet, 50), 4, 4, (3, 32, 32)),
    ("mobilenetv2", MobileNetV2, 20, 8, (3, 64, 64)),
    ("transformer", functools.partial(Transformer, size=32), 20, 8, (16, 24)),
]


def values(name, count):
    """Numbers from -1 to below 1: SplitMix64 of the place, begun at the FNV-1a hash of the name."""
    with np.errstate(over="ignore"):
        state = np.uint64(0xCBF29CE484222325)
        for byte in name.encode():
            state = (state ^ np.uint64(byte)) * np.uint64(0x100000001B3)
        z = state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0


def initial(name, shape):
    drawn = values(name, int(np.prod(shape)))
    if name.endswith("running_mean"):
        drawn = 0.0 * drawn
    elif name.endswith("running_var"):
        drawn = 0.0 * drawn + 1.0
    elif len(shape) > 1:
        drawn = drawn * np.sqrt(3.0 / np.prod(shape[1:]))
    elif name.endswith("norm.weight"):
        drawn = 1.0 + 0.1 * drawn
    else:
        drawn = 0.1 * drawn
    return torch.from_numpy(drawn.reshape(shape))


def digest(name, tensor):
    tensor = tensor.detach().flatten().numpy()
    probe = values(f"probe {name}", tensor.size)
    return [float(f"{number:.9g}") for number in (np.linalg.norm(tensor), probe @ tensor)]


def train(name, build, steps, batch, shape):
    model = build(shape=shape)
    variables = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    model.load_state_dict({k: initial(k, v.shape) for k, v in variables.items()}, strict=False)
    size = int(np.prod(shape))
    samples = values(f"samples {name}", steps * batch * size).reshape(steps, batch, *shape)
    samples = torch.from_numpy(1.7 * samples)
    labels = ((values(f"labels {name}", steps * batch) + 1.0) / 2.0 * CLASSES).astype(np.int64)
    labels = torch.from_numpy(labels.reshape(steps, batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(samples[step]), labels[step])
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {k: digest(k, v.grad) for k, v in model.named_parameters()}
        optimizer.step()
    model.eval()
    return {
        "batch": batch,
        "shape": shape,
        "losses": losses,
        "gradients": gradients,
        "final": {k: digest(k, model.state_dict()[k]) for k in variables},
        "outputs": digest("outputs", model(samples[0])),
    }


def main():
    digests = {name: train(name, *how) for name, *how in MODELS}
    models = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in digests.items())
    text = f'{{"torch": "{torch.__version__}", "models": {{\n{models}\n}}}}\n'
    (here / "digests.json").write_text(text)


if __name__ == "__main__":
    main()
