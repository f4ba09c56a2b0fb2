"""SINGA's `layer` module."""

from __future__ import annotations

from .nn.layer import (
    Add,
    AvgPool2d,
    BatchNorm2d,
    Cat,
    Conv2d,
    DepthwiseConv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    MeanSquareError,
    ReLU,
    Reshape,
    SeparableConv2d,
    Sigmoid,
    SoftMax,
    SoftMaxCrossEntropy,
)

__all__ = [
    "Add",
    "AvgPool2d",
    "BatchNorm2d",
    "Cat",
    "Conv2d",
    "DepthwiseConv2d",
    "Dropout",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool2d",
    "MeanSquareError",
    "ReLU",
    "Reshape",
    "SeparableConv2d",
    "Sigmoid",
    "SoftMax",
    "SoftMaxCrossEntropy",
]
