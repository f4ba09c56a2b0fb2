"""MNIST's four files, gzipped or not, in -data, $DISTOPT_DATA_DIR or ~/.cache/distopt/mnist."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from parts import Data
from torch.utils.data import Dataset

from distopt.errors import UsageError


def add_options(parser):
    parser.add_argument("-data", metavar="DIR", help="with MNIST's files")


class Digits(Dataset):
    """Normalized images, and labels."""

    def __init__(self, folder, part):
        self.images = read(folder, f"{part}-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
        self.labels = read(folder, f"{part}-labels-idx1-ubyte", 8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return (self.images[i] / 255 - 0.1307) / 0.3081, int(self.labels[i])


def read(folder, name, header_bytes):
    for path, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opened(path, "rb") as file:
                return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header_bytes).copy())
    raise UsageError(f"{folder} has no {name}; name the folder of MNIST's files by -data, or try -dataset synthetic")


def build(args):
    folder = Path(args.data or os.environ.get("DISTOPT_DATA_DIR") or Path.home() / ".cache/distopt/mnist")
    return Data(Digits(folder, "train"), Digits(folder, "t10k"), (1, 28, 28), classes=10)
