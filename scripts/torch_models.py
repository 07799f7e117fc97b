"""The models that ship with Flambeau, in PyTorch: with the same variables under the same names.

scripts/bench-torch.py measures them, and crates/model/tests/vectors/make_model_digests.py trains them for tests.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES = 10


class Dense(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, inputs, hidden):
        super().__init__()
        widths = [inputs, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.output = nn.Linear(widths[-1], CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.output(x)


class Mlp(Dense):
    def __init__(self, shape, hidden=(512, 256)):
        super().__init__(int(torch.tensor(shape).prod()), hidden)


class Cnn(Dense):
    def __init__(self, shape, channels=(16, 32), hidden=(128,)):
        super().__init__(channels[-1] * (shape[1] // 4) * (shape[2] // 4), hidden)
        widths = [shape[0], *channels]
        layers = (nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:]))
        self.conv = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.conv:
            x = F.max_pool2d(F.relu(layer(x)), 2)
        return super().forward(x)


class Normalized(nn.Module):
    """A convolution without bias, batch normalisation, and an activation."""

    def __init__(self, inputs, outputs, kernel, stride=1, groups=1, activation=None):
        super().__init__()
        settings = {"stride": stride, "padding": kernel // 2, "groups": groups, "bias": False}
        self.conv = nn.Conv2d(inputs, outputs, kernel, **settings)
        self.norm = nn.BatchNorm2d(outputs)
        self.activation = activation or (lambda x: x)

    def forward(self, x):
        return self.activation(self.norm(self.conv(x)))


def relu(x):
    return F.relu(x, inplace=True)


def relu6(x):
    return F.relu6(x, inplace=True)


class Residual(nn.Module):
    """Two 3x3 convolutions, or three of a bottleneck, to which the inputs are added."""

    def __init__(self, inputs, inner, stride, bottleneck):
        super().__init__()
        outputs = 4 * inner if bottleneck else inner
        if bottleneck:
            self.first = Normalized(inputs, inner, 1, activation=relu)
            self.second = Normalized(inner, inner, 3, stride, activation=relu)
            self.third = Normalized(inner, outputs, 1)
        else:
            self.first = Normalized(inputs, inner, 3, stride, activation=relu)
            self.second = Normalized(inner, inner, 3)
            self.third = None
        changes = stride > 1 or inputs != outputs
        self.shortcut = Normalized(inputs, outputs, 1, stride) if changes else None

    def forward(self, x):
        y = self.second(self.first(x))
        y = self.third(y) if self.third else y
        return relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet(nn.Module):
    """He and others, 2015: section 4.2 for 20 and 56 layers, table 1 for 18, 34 and 50."""

    PLANS = {
        18: (64, [2, 2, 2, 2], False),
        20: (16, [3, 3, 3], False),
        34: (64, [3, 4, 6, 3], False),
        50: (64, [3, 4, 6, 3], True),
        56: (16, [9, 9, 9], False),
    }

    def __init__(self, layers, shape):
        super().__init__()
        width, counts, bottleneck = self.PLANS[layers]
        self.whole = len(counts) == 4 and min(shape[1:]) >= 64
        kernel, stride = (7, 2) if self.whole else (3, 1)
        self.first = Normalized(shape[0], width, kernel, stride, activation=relu)
        self.stage = nn.ModuleList()
        inputs = width
        for number, count in enumerate(counts):
            inner, stage = width << number, nn.ModuleList()
            for block in range(count):
                stride = 2 if number > 0 and block == 0 else 1
                stage.append(Residual(inputs, inner, stride, bottleneck))
                inputs = 4 * inner if bottleneck else inner
            self.stage.append(stage)
        self.output = nn.Linear(inputs, CLASSES)

    def forward(self, x):
        x = self.first(x)
        if self.whole:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in self.stage:
            for block in stage:
                x = block(x)
        return self.output(x.mean((2, 3)))


class Inverted(nn.Module):
    """An inverted residual."""

    def __init__(self, inputs, outputs, expansion, stride):
        super().__init__()
        inner = inputs * expansion
        self.expand = Normalized(inputs, inner, 1, activation=relu6) if expansion > 1 else None
        self.depth = Normalized(inner, inner, 3, stride, inner, activation=relu6)
        self.project = Normalized(inner, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.project(self.depth(self.expand(x) if self.expand else x))
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """Sandler and others, 2018; for pictures below 64x64 the first two strides are 1."""

    STAGES = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]

    def __init__(self, shape):
        super().__init__()
        small = min(shape[1:]) < 64
        self.first = Normalized(shape[0], 32, 3, 1 if small else 2, activation=relu6)
        self.stage = nn.ModuleList()
        inputs = 32
        for number, (expansion, outputs, count, stride) in enumerate(self.STAGES):
            stage = nn.ModuleList()
            for block in range(count):
                step = stride if block == 0 and not (small and number == 1) else 1
                stage.append(Inverted(inputs, outputs, expansion, step))
                inputs = outputs
            self.stage.append(stage)
        self.last = Normalized(inputs, 1280, 1, activation=relu6)
        self.output = nn.Linear(1280, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for stage in self.stage:
            for block in stage:
                x = block(x)
        return self.output(self.last(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.projection = nn.Linear(size, 3 * size)
        self.output = nn.Linear(size, size)

    def forward(self, x):
        samples, length, size = x.shape
        parts = self.projection(x).reshape(samples, length, 3, self.heads, size // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        taken = F.scaled_dot_product_attention(queries, keys, values)
        return self.output(taken.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, size, heads, inner):
        super().__init__()
        self.attention_norm = nn.LayerNorm(size)
        self.attention = Attention(size, heads)
        self.feed_norm = nn.LayerNorm(size)
        self.expand = nn.Linear(size, inner)
        self.project = nn.Linear(inner, size)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.project(F.gelu(self.expand(self.feed_norm(x))))


class Transformer(nn.Module):
    """An encoder of vectors, of which the mean is classified."""

    def __init__(self, shape, size=128, heads=4, layers=2):
        super().__init__()
        length, features = shape
        self.input = nn.Linear(features, size)
        self.position = nn.Parameter(torch.randn(length, size) * 0.02)
        self.layer = nn.ModuleList(Layer(size, heads, 4 * size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, CLASSES)

    def forward(self, x):
        x = self.input(x) + self.position
        for layer in self.layer:
            x = layer(x)
        return self.output(self.norm(x).mean(1))
