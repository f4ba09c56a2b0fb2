"""Two convolutions with pooling and two linear layers; on MNIST, 431,080 parameters."""

from torch import nn


def build(args, data):
    channels, height, width = data.shape
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(50 * height * width, 500), nn.ReLU(), nn.Dropout(0.3), nn.Linear(500, data.classes)),
    )
