"""ResNets (arXiv 1512.03385, with the stride in the 3 x 3 convolutions), in distopt and in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..output import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from zoo import models

PARAMETERS = 25_557_032
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride of the first


def in_distopt(name: str = "resnet50", size: int = 224) -> Any:
    """The network of that name in examples/zoo, in the shape for images as large as ImageNet's."""
    return models.build(name, 1000, max(size, 64))


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
