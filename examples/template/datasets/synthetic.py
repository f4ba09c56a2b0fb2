"""Images of ten classes, each a pattern with noise: nothing needs to be downloaded."""

import torch
from parts import Data
from torch.utils.data import TensorDataset


def add_options(parser):
    parser.add_argument("-samples", type=int, default=6000, help="(6000) to train on; a sixth as many to test")


def build(args):
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)

    def images(count):
        labels = torch.randint(10, (count,), generator=generator)
        return TensorDataset(patterns[labels] + 2 * torch.randn(count, 1, 28, 28, generator=generator), labels)

    return Data(images(args.samples), images(args.samples // 6), (1, 28, 28), classes=10)
