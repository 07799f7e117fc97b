#!/usr/bin/env python3
"""Writes clicks.tsv and deepfm.safetensors, wide-deep.safetensors, dlrm.safetensors
and two-tower.safetensors beside this script: models with embedding tables, trained
by PyTorch for 20 steps on all samples of clicks.tsv at once.

    pip install torch safetensors numpy
    python make_table_vectors.py

clicks.tsv has 64 lines in Criteo's form, with few categories, some of them
missing. All arithmetic is float32 on the CPU. Dense variables are trained by
SGD at 0.1, rows by Adagrad at 0.1 (DeepFM, DLRM) or SGD at 0.5 (Wide & Deep,
two-tower). Rows begin with zeros. The loss is the mean binary cross entropy; that of
two-tower is the cross entropy of each sample's categories, as an item, among those
of all samples, given its numbers. Each file holds

    initial.<variable>    before the first step
    final.<variable>      after the last step
    losses                f32 [20], each before its own update
    ids                   i64 [n], the ids of all rows of the tables
    <table>               f32 [n, dimension], the rows after the last step
    <table>.state         f32 [n, dimension], the sums of Adagrad
"""

import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[3] / "scripts"))

from criteo_ids import category  # noqa: E402

SAMPLES, STEPS = 64, 20
NUMBERS, FIELDS, BUCKETS = 13, 26, 100_000
DIMENSION, HIDDEN = 4, (8, 6)
# With the other seed, an item's hidden units are all below zero.
SEEDS = {"two-tower": 12}


def write_clicks(path):
    random = np.random.default_rng(7)
    lines = []
    for _ in range(SAMPLES):
        numbers = [str(n) if n >= -1 else "" for n in random.integers(-3, 40, NUMBERS)]
        texts = random.integers(-1, 1 + np.arange(FIELDS) % 7)
        texts = [f"{field * 100 + text:08x}" if text >= 0 else "" for field, text in enumerate(texts)]
        lines.append("\t".join([str(random.integers(0, 2)), *numbers, *texts]) + "\n")
    path.write_text("".join(lines))


def read_clicks(path):
    labels, numbers, ids = [], [], []
    for line in path.read_text().splitlines():
        fields = line.split("\t")
        labels.append(float(fields[0]))
        of = [max(int(field or 0), 0) for field in fields[1 : 1 + NUMBERS]]
        numbers.append(np.log1p(np.array(of, np.float64)).astype(np.float32))
        ids.append([category(i, text, BUCKETS) for i, text in enumerate(fields[1 + NUMBERS :])])
    return torch.tensor(labels), torch.tensor(np.stack(numbers)), torch.tensor(ids)


def dense_shapes(prefix, inputs, outputs):
    shapes, width = {}, inputs
    for i, units in enumerate(HIDDEN):
        shapes[f"{prefix}hidden.{i}.weight"] = (units, width)
        shapes[f"{prefix}hidden.{i}.bias"] = (units,)
        width = units
    return shapes | {f"{prefix}output.weight": (outputs, width), f"{prefix}output.bias": (outputs,)}


def dense(v, prefix, x):
    for i in range(len(HIDDEN)):
        x = F.relu(F.linear(x, v[f"{prefix}hidden.{i}.weight"], v[f"{prefix}hidden.{i}.bias"]))
    return F.linear(x, v[f"{prefix}output.weight"], v[f"{prefix}output.bias"])


def wide_deep(v, numbers, rows):
    wide = F.linear(numbers, v["numbers.weight"], v["numbers.bias"]) + rows["linear"].sum(1)
    return wide + dense(v, "", torch.cat([rows["embedding"].flatten(1), numbers], 1))


def deepfm(v, numbers, rows):
    vectors = rows["embedding"]
    pairs = [
        (vectors[:, i] * vectors[:, j]).sum(1, keepdim=True) for i in range(FIELDS) for j in range(i)
    ]
    return wide_deep(v, numbers, rows) + torch.stack(pairs).sum(0)


def dlrm(v, numbers, rows):
    bottom = F.relu(dense(v, "bottom.", numbers))
    vectors = [bottom, *rows["embedding"].unbind(1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(FIELDS + 1) for j in range(i)]
    return dense(v, "top.", torch.cat([bottom, torch.stack(pairs, 1)], 1))


def two_tower(v, numbers, rows):
    query = F.normalize(dense(v, "query.", numbers))
    item = F.normalize(dense(v, "item.", rows["item"].flatten(1)))
    return query @ item.T / 0.5


def own_item(scores, _):
    return F.cross_entropy(scores, torch.arange(len(scores)))


def clicked(outputs, labels):
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), labels)


WIDE = {"numbers.weight": (1, NUMBERS), "numbers.bias": (1,)} | dense_shapes(
    "", FIELDS * DIMENSION + NUMBERS, 1
)
PAIRS = (FIELDS + 1) * FIELDS // 2


def adagrad(rows):
    return torch.optim.Adagrad(rows, lr=0.1, foreach=False)


def sgd(rows):
    return torch.optim.SGD(rows, lr=0.5, foreach=False)


MODELS = {
    "deepfm": (deepfm, WIDE, {"embedding": DIMENSION, "linear": 1}, adagrad, clicked),
    "wide-deep": (wide_deep, WIDE, {"embedding": DIMENSION, "linear": 1}, sgd, clicked),
    "dlrm": (
        dlrm,
        dense_shapes("bottom.", NUMBERS, DIMENSION) | dense_shapes("top.", DIMENSION + PAIRS, 1),
        {"embedding": DIMENSION},
        adagrad,
        clicked,
    ),
    "two-tower": (
        two_tower,
        dense_shapes("query.", NUMBERS, DIMENSION) | dense_shapes("item.", FIELDS * DIMENSION, DIMENSION),
        {"item": DIMENSION},
        sgd,
        own_item,
    ),
}


def main():
    write_clicks(HERE / "clicks.tsv")
    labels, numbers, ids = read_clicks(HERE / "clicks.tsv")
    known, places = ids.unique(return_inverse=True)
    for name, (forward, shapes, tables, optimizer_of, loss_of) in MODELS.items():
        random = np.random.default_rng(SEEDS.get(name, 5))
        initial, variables = {}, {}
        for variable, shape in shapes.items():
            bound = 1 / np.sqrt(shapes[variable.replace("bias", "weight")][1])
            initial[variable] = torch.tensor(random.uniform(-bound, bound, shape).astype(np.float32))
            variables[variable] = torch.nn.Parameter(initial[variable].clone())
        of_tables = {
            table: torch.nn.Parameter(torch.zeros(len(known), size)) for table, size in tables.items()
        }
        of_dense = torch.optim.SGD(variables.values(), lr=0.1, foreach=False)
        of_rows, losses = optimizer_of(of_tables.values()), []
        for _ in range(STEPS):
            of_dense.zero_grad()
            of_rows.zero_grad()
            rows = {table: F.embedding(places, values) for table, values in of_tables.items()}
            loss = loss_of(forward(variables, numbers, rows), labels)
            loss.backward()
            losses.append(loss.detach())
            of_dense.step()
            of_rows.step()
        tensors = {f"initial.{name}": values for name, values in initial.items()}
        tensors |= {f"final.{name}": values.detach() for name, values in variables.items()}
        tensors |= {"losses": torch.stack(losses), "ids": known}
        for table, values in of_tables.items():
            tensors[table] = values.detach()
            state = of_rows.state[values]
            if "sum" in state:
                tensors[f"{table}.state"] = state["sum"]
        save_file(tensors, HERE / f"{name}.safetensors")
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {len(known)} ids")


if __name__ == "__main__":
    main()
