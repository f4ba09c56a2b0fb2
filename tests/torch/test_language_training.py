"""examples/pytorch/language: `tiny` learns in every way, and the ranks end with the same model."""

import re
import sys

import pytest

from tests.processes import ROOT, Program

pytest.importorskip("torch")

# The loss of `tiny` on eight samples after 40 steps of two ranks with one sample each, 5.56 before.
LOSSES = {
    "ddp": 3.159,
    "ddp-fp16": 3.159,
    "ddp-power-sgd": 3.159,
    "hook-fp16": 3.159,
    "hook-4-bit": 3.158,
    "hook-top-k": 3.169,
    "hook-chunked-top-k": 3.213,
    "diloco": 3.194,
    "diloco-top-k": 3.281,
    "diloco-4-bit": 3.195,
    "diloco-streams": 3.161,
    "sparse-loco": 3.640,
}


@pytest.mark.slow(kept=1)
def test_the_model_learns_in_every_way() -> None:
    words = ["-m", "distopt", "run", "--nproc-per-node", "2", str(ROOT / "tests" / "torch" / "language.py")]
    ended = Program([sys.executable, *words], {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}).end()
    assert ended.code == 0, ended.stderr
    found = re.findall(r"end ([01]) (\S+) (\S+) (\w+)", ended.stdout)
    ends = {way: {rank: digest for rank, each, _, digest in found if each == way} for _, way, *_ in found}
    assert {way: float(loss) for _, way, loss, _ in found} == pytest.approx(LOSSES, rel=0.01)
    assert all(digests["0"] == digests["1"] for digests in ends.values())
