"""The example on a real GPU, to the accuracy of the reference."""

import re
import sys
from pathlib import Path

import pytest

from tests.gpu import require_gpu
from tests.processes import Program

require_gpu()

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(900)
def test_mnist_reaches_the_accuracy_of_the_reference():
    command = [sys.executable, str(EXAMPLES / "mnist_multiprocess.py"), "1", "--max-epoch", "10"]
    ended = Program(command, {"DISTOPT_DEVICE": "cuda"}).end(800)
    assert ended.code == 0, ended.stderr
    if "generated" in ended.stderr:
        pytest.skip("MNIST could not be downloaded, and generated digits say nothing about its accuracy")
    accuracies = [float(found) for found in re.findall(r"Evaluation accuracy = ([\d.]+)", ended.stdout)]
    print(f"\n| MNIST, accuracy after each epoch | {accuracies} |")  # first_gpu.py shows it
    assert len(accuracies) == 10
    assert max(accuracies) >= 0.989
