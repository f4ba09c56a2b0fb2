"""Plant faults in lines drawn at random, one after the other, and see whether the tests of their rooms notice.

    python -m instruments.mutants --count 60 --seed 58 --list faults.json

draws faults and writes them to the file or, if it exists, plants the faults that it lists. Use such a file to compare
the tests before and after a refactoring, since a seed draws the same faults only from the same sources. A line is
found by its text and function, also in another file; if it was rewritten, the fault is "gone". All happens in a
temporary copy of the tracked files. The tests of a room first run without a fault, and must pass; with a fault, they
fail ("caught"), pass ("survived") or exceed the limit ("time"). First comes their quick part, then the rest, of which
only so much runs as the limit leaves time for.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import distopt._core
from tests.processes import ROOT

from .plant import Mutant, draw

# Folders of sources, and patterns in tests/ of the files that must notice a fault there.
WIRE = (
    "conformance/test_conformance* conformance/test_failures* conformance/test_lifecycle* conformance/test_messages* "
)
ROOMS = {
    "distopt/engine": "conformance/test_engine* conformance/test_skipped* ranks/test_drift* "
    "ranks/test_by_hand* ranks/test_training* ranks/test_gpu_emulated* unit/test_digest* "
    "ranks/test_one_hash* unit/test_one_hash*",
    "distopt/codecs": "conformance/test_codecs.py conformance/test_codecs_on_transports* conformance/test_skipped* "
    "conformance/test_engine* unit/test_codec_options* unit/test_one_hash*",
    "distopt/comm": WIRE + "ranks/test_mpi* ranks/test_world* unit/test_checks* "
    "unit/test_launch_mpi* unit/test_world* unit/test_nccl* conformance/test_nccl*",
    "distopt/torch": "torch/test_[!te]*",
    "distopt/launch": "ranks/test_run.py ranks/test_habits* ranks/test_causes* ranks/test_launchers* ranks/test_heal* "
    "unit/test_env* unit/test_launch* unit/test_nodes* unit/test_rendezvous* "
    "unit/test_supervision* unit/test_siblings* unit/test_job* unit/test_run* ranks/test_mpi.py",
    "distopt/checkpoint": "unit/test_checkpoint* unit/test_memory* unit/test_preemption* unit/test_refusals* "
    "ranks/test_checkpoint* torch/test_checkpoint*",
    "csrc/shm": WIRE,
    "csrc/cpu": "unit/test_ops.* unit/test_ops_[pu]* unit/test_optim* unit/test_codec_kernels* unit/test_reduce* "
    "unit/test_instruction*",
}
# In the copy: the editable install finds the modules of the checkout first.
SITE = "import sys\nsys.meta_path = [each for each in sys.meta_path if 'Redirecting' not in type(each).__name__]\n"


def run(root: Path, command: list[str], limit: float) -> int | None:
    """The exit code, or None after the limit. No process of it is left."""
    env = {**os.environ, "PYTHONPATH": str(root), "DISTOPT_MUTANTS": str(root)}
    code = None
    with (root / "output.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out)
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or another user's
                if f"DISTOPT_MUTANTS={root}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
        process.wait()
    return code


def outcome_in(root: Path, room: str, limit: float) -> str:
    if room.startswith("csrc/"):
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        for command in (["-B", "build", *options], ["--build", "build", "--target", "_core"]):
            if run(root, ["cmake", *command], 1800.0) != 0:
                return "not built"
        shutil.copy(next((root / "build").glob("_core*.so")), root / "distopt")
    files = sorted({str(f) for pattern in ROOMS[room].split() for f in (root / "tests").glob(pattern)})
    end = time.monotonic() + limit
    for part in ("quick", "rest"):
        options = ["-q", "-x", "-n", "2", "--part", part, "-p", "no:cacheprovider"]
        code = run(root, [sys.executable, "-m", "pytest", *options, *files], end - time.monotonic())
        if code is None:
            return "time" if part == "quick" else "survived"
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "caught"
    return "survived"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instruments.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders of sources, separated by commas")
    parser.add_argument("--list", type=Path, help="file of faults: read if it exists, else written")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of a fault")
    options = parser.parse_args()
    if options.list and options.list.exists():
        mutants = [Mutant(*each) for each in json.loads(options.list.read_text())]
    else:
        mutants = draw(random.Random(options.seed), ROOT, options.rooms.split(","), options.count)
        if options.list:
            options.list.write_text(json.dumps(mutants, indent=1) + "\n")
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
        shutil.copy(distopt._core.__file__, root / "distopt")
        (root / "sitecustomize.py").write_text(SITE)
        for room in options.rooms.split(","):
            of_room = [each for each in mutants if each.path.startswith(f"{room}/")]
            if of_room and (outcome := outcome_in(root, room, options.limit)) != "survived":
                sys.exit(f"{room}, without a fault: {outcome}\n{(root / 'output.txt').read_text()[-9000:]}")
            for mutant in of_room:
                with mutant.planted(root) as where:
                    outcome = outcome_in(root, room, options.limit) if where else "gone"
                found[outcome] += 1
                print(f"{outcome:9} {where or mutant.path}: {mutant.before}  ->  {mutant.after}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in found.most_common()))


if __name__ == "__main__":
    main()
