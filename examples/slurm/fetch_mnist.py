"""Fetch MNIST where there is a network, on the front end: python examples/slurm/fetch_mnist.py

It goes to ~/.cache/distopt/mnist, where jobs look for it: the home folder must be the same on the compute nodes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import mnist

argparse.ArgumentParser(description=__doc__).parse_args()
digits = mnist.load()
if digits.kind == "generated":
    sys.exit(1)  # a warning has said why
print(f"{len(digits.train_x)} images to train on and {len(digits.test_x)} to test: {digits.source}")
