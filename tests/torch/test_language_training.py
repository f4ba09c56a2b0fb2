"""examples/pytorch/language: `tiny` learns in every way, and the ranks end with the same model."""

import re
import sys
from pathlib import Path

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


def test_a_job_resumes_and_its_model_is_evaluated_and_served(tmp_path: Path) -> None:
    folder, run = ROOT / "examples" / "pytorch" / "language", ["-m", "distopt", "run", "--nproc-per-node", "2"]
    files = ["--checkpoint", str(tmp_path / "steps"), "--save", str(tmp_path / "model.pt")]
    quick = [
        "--way",
        "sparse-loco",
        "--batch-size",
        "1",
        "--sync-every",
        "2",
        "--test-every",
        "2",
        "--test-samples",
        "9",
    ]

    def said(*words: str) -> str:
        ended = Program([sys.executable, *words], {"OMP_NUM_THREADS": "1"}).end()
        assert ended.code == 0, ended.stderr
        return ended.stdout

    first, second = (said(*run, str(folder / "train.py"), *quick, *files, "--steps", steps) for steps in ("4", "6"))
    assert re.findall(r"step (\d+):", first) == ["0", "2", "4"]
    assert re.findall(r"step (\d+):", second) == ["4", "6"], "it resumes"
    losses = [re.findall(r"step 4: loss ([\d.]+)", text) for text in (first, second)]
    assert losses[0] == losses[1]
    evaluated = said(str(folder / "evaluate.py"), "--weights", str(tmp_path / "model.pt"), "--samples", "9")
    (last,) = re.findall(r"step 6: loss ([\d.]+)", second)
    assert evaluated.startswith(f"loss {last}: ")
    serve = [str(folder / "serve.py"), "--tokens", "5"]
    weights = ["--weights", str(tmp_path / "model.pt")]
    alone, both, random = said(*serve, *weights), said(*run, *serve, *weights), said(*serve)
    assert alone.partition("\n1 ranks")[0] == both.partition("\n2 ranks")[0] != random.partition("\n1 ranks")[0]
