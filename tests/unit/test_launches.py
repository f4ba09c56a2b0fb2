"""What a training step launches on a GPU, counted on the emulated one, is what the docs say."""

import re
import sys

import pytest

from tests.emulation import build
from tests.processes import ROOT, Program


@pytest.mark.parametrize(("network", "label"), [("cnn", "CNN of MNIST"), ("resnet50", "ResNet-50, 224 x 224")])
def test_launches_of_a_step(network, label):
    build.build()
    ended = Program([sys.executable, "-m", "tests.emulation.launches", network]).end()
    (count,) = re.findall(r"^ *(\d+) .* in all$", ended.stdout, re.MULTILINE)
    assert f"\n| {label} | {count} |" in (ROOT / "docs" / "results" / "gpu.md").read_text(), ended.stdout
