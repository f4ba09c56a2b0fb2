"""Nets in both fronts, data, and the hash of what training leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from distopt import layer
from examples.zoo.models import Network, build

CLASSES = 4
SIDES = {"cnn": 28, "norm": 8, "resnet18": 32}  # of images
SAMPLES = 403  # no multiple of anything


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images of large and small values, with labels."""
    rng = np.random.default_rng(5)
    scale = np.exp(rng.standard_normal((SAMPLES, 1, 1, 1), np.float32))
    x = rng.standard_normal((SAMPLES, 3, SIDES[name], SIDES[name]), np.float32) * scale
    return x, rng.integers(0, CLASSES, SAMPLES).astype(np.int32)


def hash_of(states: Mapping[str, np.ndarray]) -> str:
    """Of the names and bits of arrays."""
    found = hashlib.sha256()
    for name in sorted(states):
        found.update(name.encode() + np.ascontiguousarray(states[name]).tobytes())
    return found.hexdigest()[:16]


# -- the package's own front -------------------------------------------------------------------------------------------
def net(name: str) -> Network:
    """A net of the package's own front."""
    if name != "norm":
        return build(name, CLASSES, SIDES[name])
    return Network(
        layer.Conv2d(5, 3, padding=1, bias=False),
        layer.BatchNorm2d(),
        layer.ReLU(),
        layer.Dropout(0.2),
        layer.Conv2d(7, 3, stride=2),
        layer.BatchNorm2d(momentum=0.7),
        layer.Flatten(),
        layer.Dropout(0.3),
        layer.Linear(CLASSES),
    )


# -- PyTorch -----------------------------------------------------------------------------------------------------------
def torch_net(name: str) -> Any:
    """The same net, about, of PyTorch's modules."""
    from torch import nn

    class TorchBlock(nn.Module):
        def __init__(self, before: int, channels: int, stride: int) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(before, channels, 3, stride, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
                nn.BatchNorm2d(channels),
            )
            short = [nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)]
            self.short = nn.Sequential(*(short if stride > 1 else []))

        def forward(self, x):
            return nn.functional.relu(self.main(x) + self.short(x))

    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1014, 17),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(17, CLASSES),
        )
    if name == "norm":
        return nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(5, 7, 3, stride=2),
            nn.BatchNorm2d(7, momentum=0.3),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(63, CLASSES),
        )
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*stem, *(TorchBlock(*each) for each in sizes), *head)
