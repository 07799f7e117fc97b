"""Loads a run's event files with TensorBoard's own reader, and compares them with metrics.jsonl and the final model.

Prints one JSON object: the number of scalars and of histograms that it has compared.
"""

import array
import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = pathlib.Path(sys.argv[1])
events = EventAccumulator(str(run), size_guidance={"scalars": 0, "histograms": 0})
events.Reload()


def same(one, other):
    one, other = float(one), float(other)
    return math.isnan(one) and math.isnan(other) or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)


expected = {}
for line in (run / "metrics.jsonl").read_text().splitlines():
    line = json.loads(line)
    if line["event"] == "steps":
        for name in ("loss", "samples_per_second", "epoch"):
            expected.setdefault(f"train/{name}", []).append((line["steps"], line[name]))
    elif line["event"] == "evaluation":
        for name, value in line["metrics"].items():
            expected.setdefault(f"test/{name}", []).append((line["steps"], value))

scalars = 0
assert sorted(events.Tags()["scalars"]) == sorted(expected), (events.Tags()["scalars"], sorted(expected))
for tag, values in expected.items():
    found = events.Scalars(tag)
    assert len(found) == len(values), (tag, len(found), len(values))
    for event, (step, value) in zip(found, values):
        assert event.step == step, (tag, event.step, step)
        assert same(event.value, value), (tag, step, event.value, value)
        scalars += 1

content = (run / "model.safetensors").read_bytes()
length = int.from_bytes(content[:8], "little")
header = json.loads(content[8 : 8 + length])
header.pop("__metadata__", None)
tags = events.Tags()["histograms"]
assert sorted(tags) == sorted(f"weights/{name}" for name in header), (tags, sorted(header))
for name, tensor in header.items():
    begin, end = (8 + length + offset for offset in tensor["data_offsets"])
    weights = array.array("f", content[begin:end])
    newest = events.Histograms(f"weights/{name}")[-1].histogram_value
    assert newest.num == len(weights) == sum(newest.bucket), (name, newest.num, len(weights))
    # The last checkpoint has the final weights.
    assert same(newest.min, min(weights)) and same(newest.max, max(weights)), (name, newest.min, min(weights))
    assert math.isclose(newest.sum, sum(weights), rel_tol=1e-6, abs_tol=1e-6), (name, newest.sum, sum(weights))
    # Each bucket has the values from the limit before it up to its own.
    limits = list(newest.bucket_limit)
    for i, limit in enumerate(limits):
        lower = limits[i - 1] if i else -math.inf
        inside = sum(1 for weight in weights if lower <= weight < limit)
        assert inside == newest.bucket[i], (name, lower, limit, inside, newest.bucket[i])

print(json.dumps({"scalars": scalars, "histograms": len(tags)}))
