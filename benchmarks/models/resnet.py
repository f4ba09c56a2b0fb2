"""ResNet-50 (arXiv 1512.03385, with the stride in the 3 x 3 convolutions), in distopt and in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distopt import autograd, layer, model

PARAMETERS = 25_557_032
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride of the first


class Bottleneck(layer.Layer):
    def __init__(self, channels: int, stride: int, widens: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = layer.Conv2d(channels, 1, bias=False), layer.BatchNorm2d()
        self.conv2 = layer.Conv2d(channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = layer.BatchNorm2d()
        self.conv3, self.norm3 = layer.Conv2d(4 * channels, 1, bias=False), layer.BatchNorm2d()
        self.shortcut = layer.Conv2d(4 * channels, 1, stride=stride, bias=False) if widens else None
        self.norm4 = layer.BatchNorm2d() if widens else None

    def forward(self, x: Any) -> Any:
        y = autograd.relu(self.norm1(self.conv1(x)))
        y = autograd.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return autograd.relu(autograd.add(y, self.norm4(self.shortcut(x)) if self.shortcut else x))


class ResNet50(model.Model):
    def __init__(self, size: int = 224) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(64, 7, stride=2, padding=3, bias=False), layer.BatchNorm2d()
        self.pool = layer.MaxPool2d(3, 2, 1)
        self.blocks = [
            Bottleneck(channels, 1 if i else stride, not i) for channels, count, stride in STAGES for i in range(count)
        ]
        self.mean, self.flatten, self.linear = layer.AvgPool2d(size // 32, 1), layer.Flatten(), layer.Linear(1000)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Any) -> Any:
        x = self.pool(autograd.relu(self.norm(self.conv(x))))
        for block in self.blocks:
            x = block(x)
        return self.linear(self.flatten(self.mean(x)))

    def train_one_batch(self, x: Any, y: Any) -> tuple[Any, Any]:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


def in_torch(counts: Sequence[int] = (3, 4, 6, 3), expansion: int = 4) -> Any:
    """ResNet-50; with counts of 2 and no expansion ResNet-18, whose blocks are not bottlenecks."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, channels: int, stride: int) -> None:
            super().__init__()
            outputs = expansion * channels
            sizes = [(inputs, channels, 3, stride), (channels, channels, 3, 1)]
            if expansion > 1:
                sizes = [(inputs, channels, 1, 1), (channels, channels, 3, stride), (channels, outputs, 1, 1)]
            parts = [part for size in sizes for part in (convolution(*size), nn.BatchNorm2d(size[1]), nn.ReLU())]
            self.main = nn.Sequential(*parts[:-1])
            widening = (convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            self.shortcut = nn.Identity() if (inputs, stride) == (outputs, 1) else nn.Sequential(*widening)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.main(x) + self.shortcut(x))

    def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)

    parts, inputs = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for (channels, _, stride), count in zip(STAGES, counts, strict=True):
        for i in range(count):
            parts.append(Block(inputs, channels, 1 if i else stride))
            inputs = expansion * channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
