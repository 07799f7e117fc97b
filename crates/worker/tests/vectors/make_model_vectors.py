#!/usr/bin/env python3
"""Writes softmax.safetensors, mlp.safetensors and cnn.safetensors beside this
script: small models trained by PyTorch for 20 steps of plain SGD.

    pip install torch safetensors numpy
    python make_model_vectors.py

All arithmetic is float32 on the CPU: batches of 8 random samples with random
labels 0..9, the mean cross entropy as the loss, learning rate 0.1, one batch a
step. Each file holds

    initial.<variable>    before the first step
    gradient.<variable>   the gradient of the first step
    final.<variable>      after the last step
    inputs                f32 [20, 8, ...]
    labels                i64 [20, 8]
    losses                f32 [20], each before its own update

Weights have PyTorch's shapes: (out, in), and (out, in, height, width) for a
convolution. In the CNN the linear layer after the convolutions reads their
output flattened in the order channel, height, width.

ReLU has no derivative at 0 and max pooling none at a tie, so another
implementation that rounds differently could go the other way there. The seeds
were picked to keep off such points, which is checked on every run: see
MARGIN.
"""

import json
import os
import platform

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import save

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

STEPS = 20
BATCH = 8
CLASSES = 10
LEARNING_RATE = 0.1

# No value that enters a ReLU may be nearer to 0 than this in any step, nor may
# the two largest of a pooling window be nearer to each other (unless both are
# 0, where neither lets a gradient through).
MARGIN = 1e-5

# Name -> seed, shape of a sample, variables.
MODELS = {
    "softmax": (
        1,
        (64,),
        {"output.weight": (10, 64), "output.bias": (10,)},
    ),
    "mlp": (
        145,
        (64,),
        {
            "hidden.0.weight": (32, 64),
            "hidden.0.bias": (32,),
            "hidden.1.weight": (16, 32),
            "hidden.1.bias": (16,),
            "output.weight": (10, 16),
            "output.bias": (10,),
        },
    ),
    "cnn": (
        111,
        (1, 12, 12),
        {
            "conv.0.weight": (4, 1, 3, 3),
            "conv.0.bias": (4,),
            "conv.1.weight": (8, 4, 3, 3),
            "conv.1.bias": (8,),
            "hidden.0.weight": (16, 72),
            "hidden.0.bias": (16,),
            "output.weight": (10, 16),
            "output.bias": (10,),
        },
    ),
}


class Margin:
    """The smallest distance from a point without derivative seen so far."""

    def __init__(self):
        self.smallest = float("inf")

    def relu(self, x):
        self.smallest = min(self.smallest, x.detach().abs().min().item())
        return F.relu(x)

    def pool(self, x):
        n, c, h, w = x.shape
        windows = x.detach().reshape(n, c, h // 2, 2, w // 2, 2)
        windows = windows.permute(0, 1, 2, 4, 3, 5).reshape(-1, 4)
        top = windows.topk(2, dim=1).values
        gap = (top[:, 0] - top[:, 1])[top[:, 0] > 0]
        self.smallest = min(self.smallest, gap.min().item())
        return F.max_pool2d(x, kernel_size=2, stride=2)


def forward(v, x, margin):
    for i in range(2):
        if f"conv.{i}.weight" in v:
            x = F.conv2d(x, v[f"conv.{i}.weight"], v[f"conv.{i}.bias"], padding=1)
            x = margin.pool(margin.relu(x))
    x = x.flatten(1)
    for i in range(2):
        if f"hidden.{i}.weight" in v:
            x = F.linear(x, v[f"hidden.{i}.weight"], v[f"hidden.{i}.bias"])
            x = margin.relu(x)
    return F.linear(x, v["output.weight"], v["output.bias"])


def train(seed, sample, shapes, dtype=torch.float32):
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((STEPS, BATCH, *sample)).astype(np.float32)
    labels = random.integers(0, CLASSES, (STEPS, BATCH), dtype=np.int64)
    inputs, labels = torch.from_numpy(inputs), torch.from_numpy(labels)

    tensors = {"inputs": inputs, "labels": labels}
    variables = {}
    for name, shape in shapes.items():
        # Uniform within 1/sqrt(fan in), weights and biases alike.
        fan_in = int(np.prod(shapes[name.replace("bias", "weight")][1:]))
        bound = 1.0 / np.sqrt(fan_in)
        values = random.uniform(-bound, bound, shape).astype(np.float32)
        tensors[f"initial.{name}"] = torch.from_numpy(values)
        variables[name] = torch.nn.Parameter(torch.from_numpy(values).to(dtype, copy=True))

    optimizer = torch.optim.SGD(variables.values(), lr=LEARNING_RATE, foreach=False)
    margin = Margin()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scores = forward(variables, inputs[step].to(dtype), margin)
        loss = F.cross_entropy(scores, labels[step], reduction="mean")
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            for name, variable in variables.items():
                tensors[f"gradient.{name}"] = variable.grad.clone()
        optimizer.step()
    for name, variable in variables.items():
        tensors[f"final.{name}"] = variable.detach().clone()
    tensors["losses"] = torch.stack(losses)
    return tensors, margin.smallest


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    made_with = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }
    for model, (seed, sample, shapes) in MODELS.items():
        tensors, smallest = train(seed, sample, shapes)
        assert smallest > MARGIN, f"{model}: pick another seed ({smallest})"
        # A single entry, for the order of several is not fixed.
        data = save(
            {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
            metadata={"made_with": json.dumps(made_with)},
        )
        with open(os.path.join(here, f"{model}.safetensors"), "wb") as file:
            file.write(data)


if __name__ == "__main__":
    main()
