"""The networks that PyTorch trains, by name."""

from __future__ import annotations

from torch import Tensor, nn

# Blocks of each stage, and channels that leave a block relative to those within it: 4 in a bottleneck.
RESNETS = {"resnet18": ((2, 2, 2, 2), 1), "resnet50": ((3, 4, 6, 3), 4)}


def build(name: str, *, tuned: bool = False) -> nn.Module:
    """The network for the inputs of `train.synthetic_batch`; `tuned` concerns the CNN alone, see `cnn`."""
    if name in RESNETS:
        return resnet(*RESNETS[name])
    if name == "mlp":  # 25 million parameters
        return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())))
    return cnn(tuned=tuned)


def cnn(*, tuned: bool) -> nn.Module:
    """The reference CNN. If tuned, ReLU follows pooling: the same function on a quarter of the elements."""
    activation = [nn.MaxPool2d(2), nn.ReLU()] if tuned else [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        *activation,
        nn.Conv2d(20, 50, 5),
        *activation,
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


class Block(nn.Module):
    """A residual block (arXiv 1512.03385), with the stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = expansion * channels
        sizes = [(inputs, channels, 3, stride), (channels, channels, 3, 1)]
        if expansion > 1:
            sizes = [(inputs, channels, 1, 1), (channels, channels, 3, stride), (channels, outputs, 1, 1)]
        parts = [part for size in sizes for part in (convolution(*size), nn.BatchNorm2d(size[1]), nn.ReLU())]
        self.main = nn.Sequential(*parts[:-1])
        widening = (convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if (inputs, stride) == (outputs, 1) else nn.Sequential(*widening)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches, [N, C, H, W]."""
        return nn.functional.relu(self.main(x) + self.shortcut(x))


def resnet(counts: tuple[int, ...], expansion: int) -> nn.Module:
    """The ResNet with so many blocks in each stage."""
    parts, inputs = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(counts):
        for i in range(count):
            stride = 2 if stage and not i else 1
            parts.append(Block(inputs, 64 << stage, stride, expansion))
            inputs = expansion * 64 << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
