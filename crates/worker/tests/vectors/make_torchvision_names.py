#!/usr/bin/env python3
"""Writes torchvision.json beside this script: the variables of torchvision's models, and the shape of each.

    pip install torch torchvision
    python make_torchvision_names.py
"""

import json
import pathlib

from torchvision import models

here = pathlib.Path(__file__).resolve().parent
names = {"resnet18": models.resnet18, "resnet50": models.resnet50, "mobilenetv2": models.mobilenet_v2}
shapes = {
    name: {key: list(value.shape) for key, value in build().state_dict().items()}
    for name, build in names.items()
}
lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in shapes.items())
(here / "torchvision.json").write_text(f"{{\n{lines}\n}}\n")
