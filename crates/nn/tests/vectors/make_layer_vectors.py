#!/usr/bin/env python3
"""Writes layers.safetensors beside this script: what PyTorch computes with small
inputs in each layer and loss.

    pip install torch safetensors numpy
    python make_layer_vectors.py

All arithmetic is float32 on the CPU. For each case the file holds

    <case>/<input>            its inputs and variables
    <case>/result             the result
    <case>/part               the gradient of the result (1 for a loss)
    <case>/gradient/<input>   the gradients of those that have one
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(7)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

vectors = {}


def case(name, compute, constants=None, **inputs):
    """Adds a case: `compute` takes the inputs, which have gradients, and the constants by name."""
    inputs = {key: value.detach().requires_grad_() for key, value in inputs.items()}
    result = compute(**inputs, **(constants or {}))
    others = ()
    if isinstance(result, tuple):
        result, *others = result
    part = torch.randn(result.shape) if result.dim() else torch.ones(())
    (result * part).sum().backward()
    for key, value in {**inputs, **(constants or {})}.items():
        vectors[f"{name}/{key}"] = value
    for i, other in enumerate(others):
        vectors[f"{name}/other/{i}"] = other
    vectors[f"{name}/result"] = result
    vectors[f"{name}/part"] = part
    for key, value in inputs.items():
        vectors[f"{name}/gradient/{key}"] = value.grad


def conv(name, inputs, outputs, size, kernel, stride, padding, dilation, groups, relu):
    def compute(x, weight, bias):
        y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return F.relu(y) if relu else y

    case(
        f"conv/{name}/{stride}/{padding}/{dilation}/{groups}",
        compute,
        x=torch.randn(2, inputs, *size),
        weight=torch.randn(outputs, inputs // groups, kernel, kernel),
        bias=torch.randn(outputs),
    )


conv("linear", 3, 9, (6, 7), 3, 1, 1, 1, 1, False)
conv("linear", 3, 4, (9, 8), 3, 2, 1, 1, 1, False)
conv("linear", 2, 3, (11, 10), 5, 3, 2, 1, 1, False)
conv("linear", 4, 4, (6, 6), 3, 2, 1, 1, 4, False)
conv("linear", 4, 6, (7, 5), 3, 1, 2, 2, 2, False)
conv("relu", 5, 10, (4, 4), 1, 1, 0, 1, 1, True)
conv("relu", 6, 6, (8, 8), 3, 1, 1, 1, 6, True)

for kind, pool in [("max", F.max_pool2d), ("avg", F.avg_pool2d)]:
    for kernel, stride, padding in [(2, 2, 0), (3, 2, 1), (3, 1, 1)]:
        case(
            f"pool/{kind}/{kernel}/{stride}/{padding}",
            lambda x: pool(x, kernel, stride, padding),
            x=torch.randn(2, 3, 7, 6),
        )
case("global-pool", lambda x: x.mean((2, 3)), x=torch.randn(2, 3, 5, 4))


def batch_norm(training, activation):
    def compute(x, weight, bias, running_mean, running_var):
        mean, var = running_mean.clone(), running_var.clone()
        y = F.batch_norm(x, mean, var, weight, bias, training)
        return activation(y), mean, var

    return compute


for training in [True, False]:
    for kind, activation in [("identity", lambda y: y), ("relu", F.relu), ("relu6", F.relu6)]:
        for shape in [(4, 3, 5, 4), (6, 3)]:
            case(
                f"batch-norm/{'train' if training else 'evaluate'}/{kind}/{len(shape)}",
                batch_norm(training, activation),
                {"running_mean": torch.randn(3), "running_var": torch.rand(3) + 0.5},
                x=torch.randn(shape) * 3,
                weight=torch.randn(3) * 3,
                bias=torch.randn(3),
            )

case(
    "layer-norm",
    lambda x, weight, bias: F.layer_norm(x, (37,), weight, bias),
    x=torch.randn(2, 3, 37) * 2 + 1,
    weight=torch.randn(37),
    bias=torch.randn(37),
)
case(
    "group-norm",
    lambda x, weight, bias: F.group_norm(x, 3, weight, bias),
    x=torch.randn(2, 6, 4, 5) * 2 + 1,
    weight=torch.randn(6),
    bias=torch.randn(6),
)
case("gelu", F.gelu, input=torch.randn(100) * 3)
case("relu6", F.relu6, input=torch.randn(100) * 6)
case("softmax", lambda x: F.softmax(x, -1), x=torch.randn(3, 21) * 4)
case(
    "embedding",
    lambda weight, ids: F.embedding(ids, weight),
    {"ids": torch.tensor([[0, 4, 4], [1, 4, 0]])},
    weight=torch.randn(5, 3),
)


def attention(x, in_weight, in_bias, out_weight, out_bias):
    length, size = x.shape[1:]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    y, _ = F.multi_head_attention_forward(
        x.transpose(0, 1),
        x.transpose(0, 1),
        x.transpose(0, 1),
        size,
        2,
        in_weight,
        in_bias,
        None,
        None,
        False,
        0.0,
        out_weight,
        out_bias,
        need_weights=False,
        attn_mask=hidden,
    )
    return y.transpose(0, 1)


case(
    "attention",
    attention,
    x=torch.randn(2, 5, 8),
    in_weight=torch.randn(24, 8),
    in_bias=torch.randn(24),
    out_weight=torch.randn(8, 8),
    out_bias=torch.randn(8),
)

for smoothing in [0.0, 0.1]:
    case(
        f"cross-entropy/{smoothing}",
        lambda logits, targets: F.cross_entropy(logits, targets, label_smoothing=smoothing),
        {"targets": torch.tensor([1, 0, 3, 3])},
        logits=torch.randn(4, 5) * 3,
    )
for name, loss in [
    ("binary-cross-entropy", F.binary_cross_entropy_with_logits),
    ("mean-squared-error", F.mse_loss),
    ("mean-absolute-error", F.l1_loss),
]:
    case(name, lambda x, target: loss(x, target), x=torch.randn(4, 3) * 3, target=torch.rand(4, 3))

metadata = {"torch": torch.__version__}
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "layers.safetensors")
save_file({key: value.detach().contiguous().clone() for key, value in vectors.items()}, path, metadata)
print(f"{len(vectors)} tensors, {os.path.getsize(path)} bytes")
