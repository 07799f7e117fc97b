#!/usr/bin/env python3
"""Trains DeepFM, Wide & Deep or DLRM as examples/jobs/criteo.toml does, with PyTorch in one process.

    pip install torch numpy safetensors scikit-learn
    scripts/train-torch-criteo.py TRAIN TEST --model deepfm [--seeds N] [--epochs N] [--initial FOLDER]

TRAIN and TEST are files in Criteo's form. Prints the AUC of each seed, and their mean. With --initial, models begin with the
values of FOLDER/SEED/model.safetensors, embedding.safetensors and linear.safetensors: what `flambeau checkpoint export` has
written of a run with learning rates of 1e-30. Otherwise PyTorch draws them.
"""

import argparse
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import nn

from criteo_ids import category

NUMBERS, FIELDS = 13, 26
BATCH, DIMENSION, HIDDEN = 64, 8, (64, 32)
BUCKETS = 10_000_000


def read(path, known):
    labels, numbers, ids = [], [], []
    for line in pathlib.Path(path).read_text().splitlines():
        fields = line.split("\t")
        labels.append(float(fields[0]))
        numbers.append([np.log1p(max(int(field or 0), 0)) for field in fields[1 : 1 + NUMBERS]])
        texts = enumerate(fields[1 + NUMBERS :])
        ids.append([known.setdefault(key, len(known)) for key in texts])
    return torch.tensor(labels), torch.tensor(numbers, dtype=torch.float32), torch.tensor(ids)


def begin(model, folder, known):
    """Takes initial values. Rows of the test data alone keep those of PyTorch; nobody trains them."""
    ids = [category(*key, BUCKETS) for key in known]
    variables = load_file(folder / "model.safetensors")
    layers = {f"hidden.{i}": 2 * i for i in range(len(HIDDEN))} | {"output": 2 * len(HIDDEN)}
    with torch.no_grad():
        for name, values in variables.items():
            prefix, _, rest = name.partition(".")
            part = {"bottom": "bottom", "top": "top", "numbers": None}.get(prefix, "deep")
            layer, _, kind = (rest if part in ("bottom", "top") else name).rpartition(".")
            ours = f"{part}.{layers[layer]}.{kind}" if part else name
            model.get_parameter(ours).copy_(values.reshape(model.get_parameter(ours).shape))
        for table, rows in zip(("embedding", "linear"), model.rows):
            file = load_file(folder / f"{table}.safetensors")
            places = {int(id): place for place, id in enumerate(file["ids"])}
            held = [(row, places[id]) for row, id in enumerate(ids) if id in places]
            ours, theirs = torch.tensor(held).T
            rows.weight[ours] = file["values"][theirs]


def dense(inputs, outputs):
    layers, width = [], inputs
    for units in HIDDEN:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class WideDeep(nn.Module):
    PAIRS = False

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.ModuleList([nn.Embedding(rows, DIMENSION), nn.Embedding(rows, 1)])
        nn.init.normal_(self.rows[0].weight, std=0.01)
        nn.init.zeros_(self.rows[1].weight)
        self.numbers = nn.Linear(NUMBERS, 1)
        self.deep = dense(FIELDS * DIMENSION + NUMBERS, 1)

    def forward(self, numbers, ids):
        vectors = self.rows[0](ids)
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], 1))
        logits = self.numbers(numbers) + self.rows[1](ids).sum(1) + deep
        if self.PAIRS:
            sums = vectors.sum(1).square() - vectors.square().sum(1)
            logits = logits + 0.5 * sums.sum(1, keepdim=True)
        return logits.squeeze(1)


class DeepFm(WideDeep):
    PAIRS = True


class Dlrm(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = nn.ModuleList([nn.Embedding(rows, DIMENSION)])
        nn.init.normal_(self.rows[0].weight, std=DIMENSION**-0.5)
        self.bottom = dense(NUMBERS, DIMENSION)
        self.top = dense(DIMENSION + (FIELDS + 1) * FIELDS // 2, 1)
        self.pairs = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)

    def forward(self, numbers, ids):
        bottom = F.relu(self.bottom(numbers))
        vectors = torch.cat([bottom.unsqueeze(1), self.rows[0](ids)], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, pairs], 1)).squeeze(1)


MODELS = {"deepfm": DeepFm, "wide-deep": WideDeep, "dlrm": Dlrm}
parser = argparse.ArgumentParser()
parser.add_argument("train")
parser.add_argument("test")
parser.add_argument("--model", choices=MODELS, required=True)
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--initial", type=pathlib.Path)
options = parser.parse_args()
known = {}
labels, numbers, ids = read(options.train, known)
test_labels, test_numbers, test_ids = read(options.test, known)
found = []
for seed in range(options.seeds):
    torch.manual_seed(seed)
    model = MODELS[options.model](len(known))
    if options.initial:
        begin(model, options.initial / str(seed), known)
    rows = list(model.rows.parameters())
    rest = [p for p in model.parameters() if all(p is not row for row in rows)]
    optimizers = [torch.optim.Adagrad(rows, lr=0.05), torch.optim.Adam(rest, lr=0.001)]
    for _ in range(options.epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            logits = model(numbers[batch], ids[batch])
            F.binary_cross_entropy_with_logits(logits, labels[batch]).backward()
            for optimizer in optimizers:
                optimizer.step()
    with torch.no_grad():
        logits = model(test_numbers, test_ids)
    found.append(roc_auc_score(test_labels, logits))
print(f"{options.model}: AUC", *(f"{auc:.4f}" for auc in found), f"mean {np.mean(found):.4f}")
