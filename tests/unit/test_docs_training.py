"""docs/guide/training.md: its examples run, one after the other."""

import re
from pathlib import Path

import numpy as np

from distopt import opt

TEXT = (Path(__file__).parents[2] / "docs" / "guide" / "training.md").read_text()


def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "training"}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(code, names)
    sgd, net = names["sgd"], names["net"]
    model, *layers, scores, norm = capsys.readouterr().out.splitlines()
    assert model == "Net, 147 parameters"
    assert len(layers) == 3
    assert scores.startswith("after epoch 2: [")
    assert 0 < float(norm) != sgd.grad_norm > 0
    assert sgd.step_counter.item() == 1 + 2 + 1 + 2 + 1, "updates"
    assert sgd.lr.schedule(0) == 0.1
    assert all(np.isfinite(param.array).all() for param in net.get_params().values())


def test_the_names_of_its_table_exist():
    names = re.findall(r"^\| `(\w+)\(", TEXT, re.M)
    assert len(names) == 6
    for name in names:
        assert issubclass(getattr(opt, name), opt.DecayScheduler)
