"""Architectures, data sets, trainers and so on: each is a file in its folder, and its name is the file's."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Dataset

from distopt.errors import UsageError

HERE = Path(__file__).resolve().parent

# Folder and default. Each file defines `build`, as those that are there do, and perhaps `add_options(parser)`.
FOLDERS = {
    "arch": ("archs", "cnn"),
    "dataset": ("datasets", "mnist"),
    "trainer": ("trainers", "classifier"),
    "loss": ("losses", "cross_entropy"),
    "optimizer": ("optimizers", "sgd"),
    "scheduler": ("schedulers", "cosine"),
}


class Data(NamedTuple):
    """A data set. A sample is a tuple: its tensor, and whatever else the trainer uses."""

    train: Dataset
    test: Dataset
    shape: tuple[int, ...]  # of a sample's tensor
    classes: int


def names(folder: str) -> list[str]:
    return sorted(path.stem for path in (HERE / folder).glob("[!_.]*.py"))


def part(what: str, name: str):
    """The file of this name, loaded by its path: some of the folders have names of well-known packages."""
    folder, _ = FOLDERS[what]
    if name not in names(folder):
        raise UsageError(f"-{what}: there is no {name!r} in {HERE / folder}; there are {', '.join(names(folder))}")
    full = f"{folder}.{name}"
    if full not in sys.modules:
        spec = spec_from_file_location(full, HERE / folder / f"{name}.py")
        sys.modules[full] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


def build(what: str, args, *given):
    """Build the part that `args` names from `given`."""
    return part(what, getattr(args, what)).build(args, *given)
