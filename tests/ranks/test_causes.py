"""The cause that `distopt run` names when several ranks end: the first end that its agent did not cause."""

import os
import re
import signal

import pytest

from tests.processes import HERE

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

# All ranks print a traceback. The last one ends with it, the others take their time, as a rank with threads does.
# `how` is "foreign" or "distopt": whether the ranks know distopt.
ALL_RAISE = """
import atexit, os, sys, time
from pathlib import Path

rank, size, folder, how = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), sys.argv[2]

def linger():
    if rank < size - 1:
        (folder / str(rank)).touch()  # its traceback has been printed
        time.sleep(1000)

def main():
    while rank == size - 1 and len([*folder.iterdir()]) < rank:
        time.sleep(0.01)
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


@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("how", ["foreign", "distopt"])
@pytest.mark.parametrize("n", [2, 4])
def test_of_ranks_that_all_raise_the_first_that_has_ended_is_the_cause(run, n, how):
    ended = run(ALL_RAISE, how, n=n).end(code=1)
    assert ended.stderr.count("Traceback") == n
    (line,) = ended.agent_lines
    text = rf"left with exit code 1: ValueError: the cause of rank {n - 1}"
    assert re.fullmatch(rf"distopt run: rank {n - 1} on {re.escape(HERE)} \(pid \d+\) {text}", line)


@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize(
    ("cause", "code", "text"), [("exit", 3, "left with exit code 3"), ("SIGTERM", 143, "was ended by SIGTERM")]
)
@pytest.mark.parametrize("how", ["abort", "exit"])
def test_how_a_rank_ends_that_its_agent_ends_is_not_the_cause(run, how, cause, code, text):
    ended = run(LATER, how, cause).end(code=code)
    assert "rank 1 ends, too" in ended.stderr
    (line,) = ended.agent_lines
    assert re.fullmatch(rf"distopt run: rank 0 on {re.escape(HERE)} \(pid \d+\) {text}", line)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_ends_ranks_that_raise_because_of_it_in_one_line(run, signum):
    text = "import signal, time\ndef fail(*_):\n    raise RuntimeError('interrupted')\n"
    text += f"signal.signal({int(signum)}, fail)\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    ended = run(text).ready().end_by(signum)
    assert ended.stderr.count("RuntimeError: interrupted") >= 2
    assert ended.code in {1, 128 + signum}
    assert len(ended.agent_lines) == 1


def test_a_storm_of_signals_ends_the_job_and_leaves_nothing(run):
    """Of each kind that agents pass on, dozens, to the agent and to its ranks."""
    program = run("import time\nprint('ready', flush=True)\ntime.sleep(1000)\n", n=3).ready(3)
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGWINCH, signal.SIGCONT) * 20:
        if program.process.poll() is None:
            program.process.send_signal(signum)
    ended = program.end()
    assert ended.code in {128 + signum for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    assert len(ended.agent_lines) == 1
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
def test_a_rank_that_has_lost_another_prints_no_traceback(run, front, signum):
    """It would only say where it has waited, and stand before the line with the cause."""
    if front == "torch":
        pytest.importorskip("torch")
    text = f"import os\n{ENDLESS[front]}meet()\nprint('rank', os.environ['RANK'], os.getpid(), flush=True)\n"
    program = run(text + "while True:\n    meet()\n")
    pids = dict(re.findall(r"rank (\d) (\d+)", "\n".join(program.read_lines(2))))
    os.kill(int(pids["1"]), signum)
    ended = program.end()
    own = [line for line in ended.stderr.splitlines() if not line.startswith("[rank 1] ")]
    assert not any("Traceback" in line or line.startswith("  File") for line in own), ended.stderr
    assert re.match(rf"distopt run: rank 1 on .* (was ended by {signum.name}|.*KeyboardInterrupt)", own[-1]), own[-1]
