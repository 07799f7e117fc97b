#!/usr/bin/env python3
"""Writes state.pth and checkpoint.pth beside this script: small files of PyTorch.

    pip install torch
    python make_pth.py

Both have the variables `hidden.weight` (2 x 3, the transpose of a tensor: 1 to 6 row by row), `hidden.bias` (0.5, -0.5, as
float64) and `batches` (int64); checkpoint.pth under `state_dict`. state.pth also has `part`, a view of a larger tensor.
"""

import pathlib

import torch

here = pathlib.Path(__file__).resolve().parent
state = {
    "hidden.weight": torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]).t(),
    "hidden.bias": torch.tensor([0.5, -0.5], dtype=torch.float64),
    "batches": torch.tensor(7),
}
torch.save({"state_dict": state, "epoch": 3}, here / "checkpoint.pth")
torch.save(state | {"part": torch.arange(4.0)[2:]}, here / "state.pth")
