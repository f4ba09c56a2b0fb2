"""First and last lines of scripts, under each launcher of one host: early ends, Ctrl-C, pools, exit codes, packages."""

import os
import signal
import sys
from collections.abc import Callable
from itertools import product
from subprocess import TimeoutExpired

import pytest

from tests.processes import Program, is_open_mpi, started_by

LAUNCHERS = ("mpiexec", "distopt run", "launch.main")
ENV = {"DISTOPT_TIMEOUT": "400", "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def start(script) -> Callable[..., Program]:
    """`start(launcher, text, *words)`: a script on two ranks."""
    return lambda launcher, text, *words: Program(started_by(launcher, script(text), *words), ENV)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------
INTERRUPTED = """
import sys, time
from distopt import launch
def train(rank, size):
    try:
        print("ready", flush=True)
        while True: time.sleep(0.02)
    except KeyboardInterrupt:
        if rank == 0:
            time.sleep(1.5 if "hang" not in sys.argv else 1000)
            print("saved", flush=True)
        elif "raise" in sys.argv: raise
if __name__ == "__main__": launch.main(train, 2)
"""


@pytest.mark.slow(kept=4, rest=2)
@pytest.mark.parametrize(
    ("launcher", "whom", "other"),
    [*product(LAUNCHERS[1:], ["group"], ["raise"]), *product(LAUNCHERS, ["group", "launcher"], ["returns"])],
)
def test_a_handler_of_ctrl_c_saves_however_the_other_rank_ends(start, launcher: str, whom: str, other: str) -> None:
    program = start(launcher, INTERRUPTED, other).ready()
    (os.killpg if whom == "group" else os.kill)(program.process.pid, signal.SIGINT)
    ended = program.end()
    assert "saved" in ended.stdout, ended
    assert ended.code == (130 if other == "raise" else 0) or (launcher == "mpiexec" and is_open_mpi()), ended
    assert other == "returns" or "Traceback" not in ended.stderr, ended.stderr


IMPATIENT = """
from distopt.launch.agents import agent, owner
from distopt.launch.supervise import spawn
agent.SAVING_SECONDS = owner.SAVING_SECONDS = spawn.SAVING_SECONDS = 3.0
"""


@pytest.mark.slow(kept=1, rest=2)
@pytest.mark.parametrize("launcher", ["distopt run", "launch.main"])
@pytest.mark.parametrize("again", [True, False])
def test_a_handler_of_ctrl_c_that_hangs_ends(script, again: bool, launcher: str) -> None:
    hurry = "" if again else IMPATIENT
    agent = ["-c", hurry + "from distopt.cli import main; raise SystemExit(main())", "run", "--nproc-per-node", "2"]
    words = [*(agent if launcher == "distopt run" else ()), script(hurry + INTERRUPTED), "hang"]
    program = Program([sys.executable, *words], ENV).ready()
    os.killpg(program.process.pid, signal.SIGINT)
    with pytest.raises(TimeoutExpired):
        program.process.wait(1)
    if again:
        os.killpg(program.process.pid, signal.SIGINT)
    program.end(code=130)


# -- children of ranks -------------------------------------------------------------------------------------------------
AT_THE_TOP = """
import multiprocessing, sys, distopt
world = distopt.init()
def double(i): return 2 * i
if __name__ == "__main__":
    world.all_reduce(1)
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool: print(pool.map(double, range(4)), flush=True)
    world.all_reduce(1)
"""
IN_A_WORKER = """
import multiprocessing, sys, distopt
def join(_):
    try: return repr(distopt.init())
    except Exception as error: return f"{type(error).__name__}: {error}"
if __name__ == "__main__":
    world = distopt.init()
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool: print(pool.map(join, [0])[0], flush=True)
    world.all_reduce(1)
"""


@pytest.mark.slow(kept=2, rest=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("launcher", ["mpiexec", "distopt run"])
def test_a_script_that_joins_at_its_top_and_starts_a_pool_gets_one_line(start, launcher: str, method: str) -> None:
    ended = start(launcher, AT_THE_TOP, method).end()
    assert ended.code != 0
    assert "was started by multiprocessing in rank" in ended.stderr, ended.stderr
    assert 'put the call under `if __name__ == "__main__":`' in ended.stderr
    assert "PMIU" not in ended.stderr
    assert "SpawnPoolWorker-4" not in ended.stderr


@pytest.mark.slow(kept=2, rest=2)
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("launcher", ["mpiexec", "distopt run"])
def test_a_worker_of_a_rank_does_not_join_in_its_place(start, launcher: str, method: str) -> None:
    ended = start(launcher, IN_A_WORKER, method).end(code=0)
    for rank in range(2):
        assert f"was started by multiprocessing in rank {rank}, and is not a rank" in ended.stdout, ended.stdout


# -- daemon threads at the end -----------------------------------------------------------------------------------------
DAEMON = """
import threading, time
import numpy as np
import distopt
from distopt import layer, tensor
world = distopt.init()
def work():
    convolution, x = layer.Conv2d(8, 3), tensor.from_numpy(np.ones((16, 3, 16, 16), np.float32))
    while True: convolution(x)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("launcher", ["mpiexec", "distopt run"])
def test_a_daemon_thread_at_work_does_not_abort_the_end(start, launcher: str) -> None:
    ended = start(launcher, DAEMON).end()
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")


# -- codes, packages ---------------------------------------------------------------------------------------------------
EXITS = """
import sys
from distopt import launch
def train(rank, size):
    if rank == 0: sys.exit(eval(sys.argv[1]))
if __name__ == "__main__": launch.main(train, 2)
"""


@pytest.mark.slow(kept=3, rest=4)
@pytest.mark.parametrize(
    ("value", "code"), [("256", 0), ("257", 1), ("-1", 255), ("True", 1), ("'text'", 1), ("2**80", 255), ("None", 0)]
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exit_codes_are_those_of_one_process(start, launcher: str, value: str, code: int) -> None:
    ended = start(launcher, EXITS, value).end()
    assert ended.code == code or (launcher == "mpiexec" and code and ended.code in {code, signal.SIGKILL}), ended
    assert bool(ended.stderr) == bool(code), ended.stderr
