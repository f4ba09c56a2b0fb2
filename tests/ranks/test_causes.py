"""The cause that `distopt run` names when several ranks end: the first end that its agent did not cause."""

import os
import re
import signal
import sys

import pytest

from tests.processes import Ended, Program

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

HERE = os.uname().nodename
RAISED = "left with exit code 1: ValueError: the cause of rank"

# All ranks print a traceback. The last one ends with it, the others take their time, as a rank with threads does.
# `how` is "foreign" or "distopt": whether the ranks know distopt.
ALL_RAISE = """
import atexit, os, sys, time
from pathlib import Path

rank, size, folder, how = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), sys.argv[2]

def wait(count):
    while len([*folder.iterdir()]) < count:
        time.sleep(0.01)

def linger():
    if rank < size - 1:
        (folder / str(rank)).touch()  # its traceback has been printed
        time.sleep(1000)

def main():
    if rank == size - 1:
        wait(size - 1)
    raise ValueError(f"the cause of rank {rank}")

atexit.register(linger)
if how == "distopt":
    from distopt import launch
    launch.main(main)
else:
    main()
"""

# Rank 0 fails, and SIGTERM, which its agent sends then, has rank 1 end in a way of its own.
LATER = """
import os, signal, sys, time
from pathlib import Path

def end(*_):
    print("rank 1 ends, too", file=sys.stderr, flush=True)
    if sys.argv[2] == "exit":
        os._exit(7)
    os.abort()

ready = Path(sys.argv[1], "ready")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, end)
    ready.touch()
    time.sleep(1000)
while not ready.exists():
    time.sleep(0.01)
if sys.argv[3] == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(3)
"""


def command(tmp_path, text: str, *options: str) -> tuple[list[str], list[str]]:
    script, folder = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(text)
    folder.mkdir()
    return [sys.executable, "-m", "distopt", "run", *options], [str(script), str(folder)]


def told(ended: Ended) -> list[str]:
    return [line for line in ended.stderr.splitlines() if line.startswith("distopt run: ")]


@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("how", ["foreign", "distopt"])
@pytest.mark.parametrize("n", [2, 4])
def test_of_ranks_that_all_raise_the_first_that_has_ended_is_the_cause(tmp_path, n, how):
    run, script = command(tmp_path, ALL_RAISE, "--nproc-per-node", str(n))
    ended = Program([*run, *script, how]).end()
    assert ended.stderr.count("Traceback") == n
    assert ended.code == 1
    (line,) = told(ended)
    assert re.fullmatch(rf"distopt run: rank {n - 1} on {re.escape(HERE)} \(pid \d+\) {RAISED} {n - 1}", line)


@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(
    ("cause", "code", "text"), [("exit", 3, "left with exit code 3"), ("SIGTERM", 143, "was ended by SIGTERM")]
)
@pytest.mark.parametrize("how", ["abort", "exit"])
def test_how_a_rank_ends_that_its_agent_ends_is_not_the_cause(tmp_path, how, cause, code, text):
    run, script = command(tmp_path, LATER, "--nproc-per-node", "2")
    ended = Program([*run, *script, how, cause]).end()
    assert "rank 1 ends, too" in ended.stderr
    assert ended.code == code
    (line,) = told(ended)
    assert re.fullmatch(rf"distopt run: rank 0 on {re.escape(HERE)} \(pid \d+\) {text}", line)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_ends_ranks_that_raise_because_of_it_in_one_line(tmp_path, signum):
    text = (
        "import signal, time\n"
        "def fail(*_):\n    raise RuntimeError('interrupted')\n"
        f"signal.signal({int(signum)}, fail)\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    )
    run, (script, _) = command(tmp_path, text, "--nproc-per-node", "2")
    program = Program([*run, script])
    program.read_lines(2)
    program.process.send_signal(signum)
    ended = program.end()
    assert ended.stderr.count("RuntimeError: interrupted") >= 2
    assert ended.code in {1, 128 + signum}
    assert len(told(ended)) == 1


def test_a_storm_of_signals_ends_the_job_and_leaves_nothing(tmp_path):
    """Of each kind that agents pass on, dozens, to the agent and to its ranks."""
    text = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    run, (script, _) = command(tmp_path, text, "--nproc-per-node", "3")
    program = Program([*run, script])
    program.read_lines(3)
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGWINCH, signal.SIGCONT) * 20:
        if program.process.poll() is None:
            program.process.send_signal(signum)
    ended = program.end()
    assert ended.code in {128 + signum for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    assert len(told(ended)) == 1
    assert "Traceback" not in ended.stderr


# A collective after another, by distopt's own front or by PyTorch's, until rank 1 is interrupted.
ENDLESS = {
    "distopt": "import distopt\nworld = distopt.init()\nmeet = lambda: world.all_reduce(1.0)\n",
    "torch": "import torch, torch.distributed as dist, distopt.torch\ndist.init_process_group('distopt')\n"
    "meet = lambda: dist.all_reduce(torch.ones(1))\n",
}


@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("front", ENDLESS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_rank_that_has_lost_another_prints_no_traceback(tmp_path, front, signum):
    """It would only say where it has waited, and stand before the line with the cause."""
    if front == "torch":
        pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os\n{ENDLESS[front]}meet()\nprint('rank', os.environ['RANK'], os.getpid(), flush=True)\n"
    )
    script.write_text(script.read_text() + "while True:\n    meet()\n")
    program = Program([sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", str(script)])
    pids = dict(re.findall(r"rank (\d) (\d+)", "\n".join(program.read_lines(2))))
    os.kill(int(pids["1"]), signum)
    ended = program.end()
    own = [line for line in ended.stderr.splitlines() if not line.startswith("[rank 1] ")]
    assert not any("Traceback" in line or line.startswith("  File") for line in own), ended.stderr
    assert re.match(rf"distopt run: rank 1 on .* (was ended by {signum.name}|.*KeyboardInterrupt)", own[-1]), own[-1]
