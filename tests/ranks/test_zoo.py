"""The networks of examples/zoo, and their training function as users call it."""

import re
import sys

import numpy as np
import pytest

from distopt import opt, tensor
from tests.processes import ROOT, Ended, Program

sys.path.insert(0, str(ROOT / "examples"))
from zoo import models

TRAIN = str(ROOT / "examples" / "zoo" / "train.py")
# Parameters for 10 classes and 3 channels of 32 x 32; torchvision's ResNets have as many for their own first layer.
PARAMETERS = {"resnet18": 11_173_962, "resnet34": 21_282_122, "resnet50": 23_520_842, "xceptionnet": 20_827_442}


@pytest.mark.slow(kept=2)
@pytest.mark.sweep(rest=4)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_step_of_every_network(name, half):
    rng = np.random.default_rng(0)
    x, y = tensor.from_numpy(rng.standard_normal((2, 3, 32, 32), np.float32)), tensor.from_numpy(np.array([1, 7]))
    net = models.build(name, image_size=32)
    net.half = half
    net.set_optimizer(opt.SGD(lr=0.001))
    net.compile([x], is_train=True)
    count = sum(param.size() for param in net.get_params().values())
    assert count == PARAMETERS.get(name, count)
    before = {key: param.to_numpy() for key, param in net.get_params().items()}
    net.train_one_batch(x, y)
    after = {key: param.to_numpy() for key, param in net.get_params().items()}
    assert all(np.isfinite(array).all() and array.dtype == np.float32 for array in after.values())
    assert any((after[key] != before[key]).any() for key in before)


def trained(words: str, *more: str) -> Ended:
    return Program([sys.executable, TRAIN, *words.split(), *more], {"OMP_NUM_THREADS": "1"}).end()


def losses(ended: Ended) -> list[float]:
    assert ended.code == 0, ended.stderr
    return [float(word) for word in re.findall(r"Training loss = (\S+),", ended.stdout)]


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("option", ["fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold"])
def test_resnet18_trains(option):
    first, last = losses(trained("--np 2 --model resnet18 --images 32 -b 8 -m 2 -l 0.005 --sync-batch-norm -d", option))
    assert last < first


@pytest.mark.slow(kept=1)
def test_cifar10_files_and_checkpoints(tmp_path):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        rows = rng.integers(0, 256, (16, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(tmp_path / name)
    words = f"--np 2 --model mlp --data cifar10 --precision float16 -b 8 --data-dir {tmp_path}"
    whole = losses(trained(words, "-m", "2"))
    parts = [losses(trained(words, "--checkpoint", str(tmp_path / "runs"), "-m", count)) for count in ("1", "2")]
    assert whole == parts[0] + parts[1]
    (tmp_path / "test_batch.bin").write_bytes(b"0" * 100)
    ended = trained(words)
    assert ended.code == 2
    assert "test_batch.bin has 100 bytes, which are no images of 3073 bytes" in ended.stderr
