"""MNIST's four files, gzipped or not, in -data_dir, $DISTOPT_DATA_DIR or ~/.cache/distopt/mnist."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from parts import Data
from torch.utils.data import TensorDataset

from distopt.errors import UsageError

FILES = {"images-idx3-ubyte": 16, "labels-idx1-ubyte": 8}  # and the sizes of their headers, in bytes


def add_options(parser):
    parser.add_argument("-data_dir", metavar="DIR", help="with MNIST's files")


def read(folder, name, header_bytes):
    for path, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opened(path, "rb") as file:
                return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header_bytes).copy())
    raise UsageError(f"{folder} has no {name}; -data_dir names the folder that has, and -dataset synthetic needs none")


def build(args):
    folder = Path(args.data_dir or os.environ.get("DISTOPT_DATA_DIR") or Path.home() / ".cache/distopt/mnist")
    sets = []
    for part in ("train", "t10k"):
        images, labels = (read(folder, f"{part}-{kind}", size) for kind, size in FILES.items())
        sets.append(TensorDataset((images.view(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081, labels.long()))
    return Data(*sets, (1, 28, 28), classes=10)
