"""MNIST's four files, gzipped or not, in -data_dir, $DISTOPT_DATA_DIR or ~/.cache/distopt/mnist."""

import gzip
import os
from pathlib import Path

import torch
from parts import Data
from torch.utils.data import TensorDataset

from distopt.errors import UsageError


def add_options(parser):
    parser.add_argument("-data_dir", metavar="DIR", help="with MNIST's files")


def read(folder, name):
    for path, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opened(path, "rb") as file:
                content = bytearray(file.read())
            return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * content[3])  # content[3] dimensions
    raise UsageError(f"{folder} has no {name}; -data_dir names the folder that has, and -dataset synthetic needs none")


def build(args):
    folder = Path(args.data_dir or os.environ.get("DISTOPT_DATA_DIR") or Path.home() / ".cache/distopt/mnist")
    sets = []
    for part in ("train", "t10k"):
        images, labels = (read(folder, f"{part}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        sets.append(TensorDataset((images.view(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081, labels.long()))
    return Data(*sets, (1, 28, 28), classes=10)
