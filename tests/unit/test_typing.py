"""Type checkers on what users write: README's program, both MNIST examples, and mistakes that they must find."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
EXAMPLES = [str(ROOT / "examples" / name) for name in ("mnist_dist.py", "mnist_multiprocess.py")]
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--no-incremental"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}

RIGHT = """
import numpy as np
import distopt
from distopt import autograd, layer, opt, tensor
sgd = opt.DistOpt(opt.SGD(lr=0.1), check_every=10)
sgd.lr = opt.CosineDecay(0.1, 900)
print(sgd.lr, sgd.grad_norm, layer.Conv2d(3, 3)(tensor.ones((1, 1, 4, 4))).shape, autograd.tanh)
world = distopt.init()
mean: float = world.all_reduce(1, "mean")
total: int = world.all_reduce(3)
world.all_reduce(np.ones(3)).sum()
sums: tensor.Tensor = world.all_reduce(tensor.ones((3,)))
"""
WRONG = {
    'opt.DistOpt(opt.SGD(lr=0.1), bogus=3)': "bogus",
    'world.all_reduce(1, "avg")': "all_reduce",
    'word: str = world.all_reduce(1.5)': "float",
}  # fmt: skip


def check(checker: str, *files: str) -> tuple[int, str]:
    if checker == "mypy":
        pytest.importorskip("mypy")
    elif not shutil.which("pyright"):
        pytest.skip("pyright is not installed; pip install pyright")
    done = subprocess.run([*CHECKERS[checker], *files], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_programs_of_users_have_no_type_error_and_mistakes_are_some(checker, tmp_path):
    for name, text in {"readme": README, "right": RIGHT, "wrong": RIGHT + "\n".join(WRONG)}.items():
        (tmp_path / f"{name}.py").write_text(text)
    code, output = check(checker, str(tmp_path / "readme.py"), str(tmp_path / "right.py"), *EXAMPLES)
    assert code == 0, output
    code, output = check(checker, str(tmp_path / "wrong.py"))
    assert code == 1
    first = RIGHT.count("\n") + 1
    for line, word in enumerate(WRONG.values(), first):
        assert re.search(rf"wrong\.py:{line}:.*{word}", output), output
    assert not re.findall(rf"wrong\.py:(?!({'|'.join(map(str, range(first, first + len(WRONG))))}):)\d+: error", output)
