"""What a script finds and how its job ends, by torchrun and by `distopt run`: the same, but for what the guide lists.

docs/guide/launching.md says what differs: the exit code after a failure or a signal, and the marks of lines.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import Ended, Program

pytest.importorskip("torch")

LAUNCHERS = {"torchrun": ["torch.distributed.run", "--standalone"], "distopt run": ["distopt", "run"]}
KILLED = 128 + signal.SIGKILL
START = """import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words):  # in one piece: under torchrun the pieces of two ranks' lines mix
    sys.stdout.write(f"{' '.join(map(str, (rank, *words)))}\\n")
"""


class Case(NamedTuple):
    """A script of two ranks.

    Attributes:
        script: its lines, after those of `START`.
        lines: what it writes, of both ranks in the order of their numbers.
        codes: exit codes by torchrun and by `distopt run`.
        options: of the launcher; "-m" for a module, "--no-python" for a program of another kind.
        words: arguments of the script.
        stdin: of the launcher, as a shell writes it.
        sent: signal to the launcher, once each rank has written a line.
        errors: text on stderr.
    """

    script: str
    lines: list[str]
    codes: tuple[int, int] = (0, 0)
    options: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    stdin: str = "</dev/null"
    sent: int = 0
    errors: str = ""


WAIT = "time.sleep(300)"
# Rank 0 stays; rank 1 goes on, once the other has written what it writes.
STAY = f"""if rank == 0:
    open('ready', 'w').close()
    {WAIT}
while not os.path.exists('ready'):
    time.sleep(0.01)
"""
NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
NAMES += ["ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"]
WORDS = ("--lr=1e-3", "-m", "two words", "", "--nproc-per-node", "3", "--", "*")
FINDS = f"""
import atexit, multiprocessing, subprocess, threading
def work(way):
    say(way)
if __name__ == "__main__":  # not in workers
    say([int(signal.getsignal(each) in (0, signal.default_int_handler)) for each in (2, 15, 17, 10)])
    say(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    say(sys.argv[1:])
    say(os.path.basename(os.getcwd()), sys.argv[0], bool(__file__), os.path.samefile(sys.path[0], '.'))
    say(*(os.environ.get(name) for name in {NAMES}))
    port, name = os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_RUN_ID']
    say(int(port) > 0, bool(os.environ['MASTER_ADDR']), bool(name), os.environ['OF_THE_USER'])
    out, own = sys.stdout, os.getsid(0) == os.getpid()
    say(sys.executable == os.environ['OF_THE_TEST'], out.write_through, out.isatty(), own)
    say('read', repr(sys.stdin.read()))
    program = 'import os; os.write(1, os.environ["RANK"].encode() + b" child\\\\n")'
    subprocess.run([sys.executable, '-c', program], check=True)
    for way in ('fork', 'spawn', 'forkserver'):
        process = multiprocessing.get_context(way).Process(target=work, args=(way,))
        process.start()
        process.join()
        assert process.exitcode == 0
    atexit.register(say, 'exits')
    open(f"names {{rank}}", "w").write(" ".join(os.environ))
    threading.Thread(target=lambda: {WAIT}, daemon=True).start()
    threading.Thread(target=lambda: (time.sleep(0.3 if rank else 1), say('ends'))).start()
"""
FOUND = f"""{list(WORDS)}
RANK RANK 2 2 0 1 RANK 2 trainer 0 2 1
folder script.py True True
True True True kept
True True False True
[1, 1, 1, 1]
set()
read ''
child
fork
forkserver
spawn
exits
ends"""
LOOKS = Case(
    FINDS,
    sorted(f"{rank} {text.replace('RANK', rank)}" for rank in "01" for text in FOUND.splitlines()),
    options=("--role", "trainer", "--max-restarts", "2"),
    words=WORDS,
)
CASES = {
    "module": Case(
        "say(__name__, __package__, os.path.basename(sys.argv[0]), sys.path[0] == os.getcwd(), sys.argv[1:])",
        [f"{rank} __main__  script.py True ['-x']" for rank in (0, 1)],
        options=("-m",),
        words=("-x",),
    ),
    "program": Case(
        'echo "$RANK of $WORLD_SIZE: $1"',
        [f"{rank} of 2: a b" for rank in (0, 1)],
        options=("--no-python",),
        words=("a b",),
    ),
    "restart": Case(
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsay('attempt', attempt)\n"
        "open(str(rank), 'w').close()\nwhile not os.path.exists(str(1 - rank)):\n    time.sleep(0.01)\n"
        "sys.exit(attempt == 0)",
        [f"{rank} attempt {attempt}" for rank in (0, 1) for attempt in (0, 1)],
        options=("--max-restarts", "1"),
    ),
    "exit code": Case(f"say('begins')\n{STAY}sys.exit(3)", ["0 begins", "1 begins"], (1, 3)),
    "exception": Case(f"rank or {WAIT}\nraise ValueError('the mistake')", [], (1, 1), errors="ValueError: the mistake"),
    "killed": Case(f"say('begins')\n{STAY}os.kill(os.getpid(), 9)", ["0 begins", "1 begins"], (1, KILLED)),
    "told of a failure": Case(
        f"def save(*_):\n    say('saves')\n    sys.exit(0)\nsignal.signal(15, save)\n{STAY}sys.exit(1)",
        ["0 saves"],
        (1, 1),
    ),
    "SIGINT": Case(
        f"try:\n    say('begins')\n    {WAIT}\nexcept KeyboardInterrupt:\n    say('is interrupted')\n    raise",
        [f"{rank} {text}" for rank in (0, 1) for text in ("begins", "is interrupted")],
        (1, 128 + signal.SIGINT),
        sent=signal.SIGINT,
    ),
    "SIGTERM": Case(f"say('begins')\n{WAIT}", ["0 begins", "1 begins"], (1, 128 + signal.SIGTERM), sent=signal.SIGTERM),
    "SIGTERM handled": Case(
        f"def save(*_):\n    say('saves')\n    sys.exit(0)\nsignal.signal(15, save)\nsay('begins')\n{WAIT}",
        [f"{rank} {text}" for rank in (0, 1) for text in ("begins", "saves")],
        (1, 0),
        sent=signal.SIGTERM,
    ),
    "input": Case("say(repr('' if rank else sys.stdin.read()))", ["0 'a line\\n'", "1 ''"], stdin="<input"),
    "closed input": Case("say('ends')", ["0 ends", "1 ends"], stdin="<&-"),
    "output without an end, and os._exit": Case(
        # Rank 0's line comes before, since it would go on where rank 1's has no end.
        "say('ends')\nopen(f'ready {rank}', 'w').close()\nwhile not os.path.exists('ready 0'):\n    time.sleep(0.01)\n"
        "os.write(1, b'%d \\xc3\\xa9' % rank + b'x' * 100000 if rank else b'')\nos._exit(0)",
        ["0 ends", "1 ends", "1 \u00e9" + "x" * 100000],
    ),
    "files alone": Case("say('out')", [], options=("--redirects", "3", "--log-dir", "logs")),
    "files as well": Case(
        "say('out')\nsys.stderr.write('err')", ["0 out", "1 out"], options=("--tee", "1:1", "--log-dir", "logs")
    ),
    "one rank's output": Case(
        "say('out')", ["1 out"], options=("--local-ranks-filter", "1", "--tee", "3", "--log-dir", "logs")
    ),
    "group left": Case(
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.all_reduce(total := torch.tensor(rank + 1))\nsay(total.item(), type(dist.group.WORLD).__name__)\n"
        "dist.barrier()",
        ["0 3 DistoptProcessGroup", "1 3 DistoptProcessGroup"],
    ),
}


@pytest.mark.slow(kept=3)
@pytest.mark.parametrize("name", CASES)
def test_a_script_finds_the_same(name: str, tmp_path: Path) -> None:
    logs = [logs_of(launcher, CASES[name], tmp_path) for launcher in LAUNCHERS]
    assert logs[0] == logs[1]
    assert bool(logs[0]) == ("logs" in CASES[name].options)


def test_a_script_looks_around(tmp_path: Path) -> None:
    """The variables that only torchrun sets are those that the guide names."""
    torchrun, own = LAUNCHERS
    assert logs_of(torchrun, LOOKS, tmp_path) == logs_of(own, LOOKS, tmp_path) == {}
    names = {launcher: set((tmp_path / launcher / "folder" / "names 1").read_text().split()) for launcher in LAUNCHERS}
    missing = names[torchrun] - names[own]
    assert missing == {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"}
    more = {name for name in names[own] - names[torchrun] if not name.startswith("DISTOPT_")}
    assert more <= {"PYTHONUNBUFFERED"}, more


def logs_of(launcher: str, case: Case, place: Path) -> dict[str, str]:
    """The files of output, by name, of a job that writes and ends as the case says."""
    folder = place / launcher / "folder"
    folder.mkdir(parents=True)
    ended = run(launcher, case, folder)
    assert ended.code == case.codes[[*LAUNCHERS].index(launcher)], (launcher, ended)
    found = sorted(re.sub(r"^\[(rank 1|\w+\d)\]:? ?", "", line) for line in ended.stdout.splitlines())
    assert found == case.lines, (launcher, ended)
    assert case.errors in ended.stderr, (launcher, ended)
    files = sorted(path for path in folder.glob("logs/*/attempt_0/*/*") if path.suffix == ".log")
    return {str(Path(*path.parts[-3:])): path.read_text() for path in files}


def run(launcher: str, case: Case, folder: Path) -> Ended:
    is_shell = "--no-python" in case.options
    (folder / "script.py").write_text(case.script if is_shell else START + case.script)
    (folder / "input").write_text("a line\n")
    script = {"-m": ["script"], "--no-python": ["sh", "script.py"]}.get((*case.options, "")[0], ["script.py"])
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "--nproc-per-node", "2", *case.options, *script, *case.words]
    variables = {"OF_THE_USER": "kept", "OF_THE_TEST": sys.executable, "DISTOPT_AS_GLOO": "1", "OMP_NUM_THREADS": "1"}
    # A shell enters the folder, and becomes the launcher.
    program = Program(["sh", "-c", f'cd "$0" && exec "$@" {case.stdin}', str(folder), *command], variables)
    first = []
    if case.sent:
        first = program.read_lines(2)
        program.process.send_signal(case.sent)
    ended = program.end()
    return Ended(ended.code, "\n".join([*first, ended.stdout]), ended.stderr)
