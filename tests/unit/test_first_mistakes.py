"""Users' first mistakes in starting ranks: a real script each, ended at once, with one line that helps."""

import os
import re
import sys
import zipapp
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.processes import ROOT, Ended, Program

PYTHON = sys.executable
COMMANDS = {
    "script": [PYTHON, "{script}"],
    "-m": [PYTHON, "-m", "mistake"],
    "-m package": [PYTHON, "-m", "mistake"],
    "-c": [PYTHON, "-c", "{text}"],
    "stdin": ["sh", "-c", '"$0" - < "$1"', PYTHON, "{script}"],
    "prompt": ["sh", "-c", '"$0" -i -q < "$1"', PYTHON, "{script}"],
    "prompt after a script": ["sh", "-c", '"$0" -i -q "$2" < "$1"', PYTHON, "{script}", "{other}"],
}
OTHER = """
from distopt import launch
def work(rank, world_size): print("rank", rank)
"""
UNGUARDED = OTHER + "launch.main(work, 2)\n"


def run(folder: Path, text: str, how: str = "script") -> Ended:
    """Run `text`; nothing of it may remain. `other` and `unguarded` are modules that it can import."""
    script, other = folder / "mistake.py", folder / "other.py"
    if how == "-m package":
        script = folder / "mistake" / "__main__.py"
        script.parent.mkdir()
    for path, content in ((script, text), (other, OTHER), (folder / "unguarded.py", UNGUARDED)):
        path.write_text(content)
    places = {"{script}": str(script), "{other}": str(other), "{text}": text}
    env = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "DISTOPT_TIMEOUT": "1000"}  # longer than a test waits
    return Program([places.get(word, word) for word in COMMANDS[how]], env).end()


def guarded(*lines: str) -> str:
    return "".join(f"{line}\n" for line in ['if __name__ == "__main__":', *(f"    {line}" for line in lines)])


def main_of(call: str, before: str = "") -> str:
    """A proper script but for `call`, or for what it calls."""
    return f"{OTHER}{before}\n{guarded(call)}"


NOT_SENT = "cannot be sent to the ranks"
NOT_LOADED = "rank ? (pid *) failed: cannot load the function or args (*get attribute 'work' on *); define the function"
NO_SCRIPT = "error: the ranks cannot import work from a notebook, a prompt or -c; write it * %%writefile job.py, and"
NO_GUARD = 'rank ? (pid *) imports the script, * start them under `if __name__ == "__main__":`'
GIVEN = "cannot be called with rank and world_size and"
LOCKED = """
import threading
class Trainer:
    def __init__(self): self.lock = threading.Lock()
    def work(self, rank, world_size): pass
"""
ONE_WAY = """
class OneWay(Exception):
    def __init__(self, a, b): super().__init__(a)
"""
# by name: a script, the start of its line on stderr, as a pattern of a shell, and how it is run
IMPORT, TRAIN = "from distopt import launch", "launch.main(train, 2)"
INNER = f"{IMPORT}\ndef outer():\n    def work(rank, world_size): pass\n    launch.main(work, 2)\n" + guarded("outer()")
UNDER_GUARD = guarded(IMPORT, "def work(*ranks): pass", "launch.main(work, 2)")
ALIVE = "if __name__ != '__main__': threading.Thread(target=time.sleep, args=(1000,)).start()\n"
MAKE_LOCK = "import multiprocessing\n    lock = multiprocessing.get_context('spawn').Lock()\n"
SEND_LOCK = MAKE_LOCK + "    launch.main(work, 2, (lock, open('/dev/null')))"
GONE = "import os, tempfile\nfolder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)"
PROMPT = UNGUARDED.replace("\nlaunch", "\n\nlaunch")
NEW_PROMPT = PROMPT.replace("work", "new")
TAKES_A_LOCK = main_of(SEND_LOCK, "def work(rank, world_size, lock, file): pass")
STDIN = "error: the ranks cannot import the script from <stdin>; save it as a file"
CREATE = "* create it in the function"
NOT_UNPICKLED = "rank ? (pid *) failed: cannot load the function or args (TypeError: *); "
NOT_UNPICKLED += "pass args that pickle can restore"
TOO_FEW = f"error: train(rank, world_size, lr) {GIVEN} 0 values of args: * 'lr'; change its parameters or args"
YIELDS = "error: a call of train runs nothing, since it yields or is async; pass a function that runs it"
NO_FOLDER = "error: rank 0 cannot be started: the working directory has been deleted; change to another"
MISTAKES = {
    "a lambda": (main_of("launch.main(lambda *ranks: None, 2)"), f"error: <lambda> {NOT_SENT}"),
    "an inner function": (INNER, f"error: outer.<locals>.work {NOT_SENT} * pass a function of the top level"),
    "a method": (main_of("launch.main(Trainer().work, 2)", LOCKED), f"error: Trainer.work {NOT_SENT}"),
    "a function under the guard": (UNDER_GUARD, NOT_LOADED),
    "a function under the guard in the main of a package": (UNDER_GUARD, NOT_LOADED, "-m package"),
    "a function of -c": (UNGUARDED, NO_SCRIPT, "-c"),
    "a function of stdin": (UNGUARDED, STDIN, "stdin"),
    "a function of a prompt": (PROMPT, NO_SCRIPT, "prompt"),
    "a function of a prompt after a script": (NEW_PROMPT, NO_SCRIPT.replace("work", "new"), "prompt after a script"),
    "no guard": (UNGUARDED, NO_GUARD),
    "no guard with -m": (UNGUARDED, NO_GUARD, "-m"),
    "no guard in the main of a package": (UNGUARDED, NO_GUARD, "-m package"),
    "no guard in a module": ("import unguarded", NO_GUARD),
    "no guard in a module that only the function needs": ("import unguarded", NO_GUARD, "-c"),
    "no guard, and a thread that would go on": (f"import threading, time\n{ALIVE}{UNGUARDED}", NO_GUARD),
    "an argument that cannot be sent": (TAKES_A_LOCK, f"error: args?1?, of type TextIOWrapper, {NOT_SENT} {CREATE}"),
    "an argument that cannot be loaded": (main_of("launch.main(print, 2, (OneWay(1, 2),))", ONE_WAY), NOT_UNPICKLED),
    "too few arguments": (main_of(TRAIN, "def train(rank, world_size, lr): pass"), TOO_FEW),
    "a generator": (main_of(TRAIN, "def train(rank, world_size): yield rank"), YIELDS),
    "a working directory that has been deleted": (main_of("launch.main(work, 2)", GONE), NO_FOLDER),
}
# by the arguments of `launch.main`: its line
CALLS = {
    "work, 2, (launch.Ticket())": "args is a Ticket, not a tuple; pass a single value as args=(value,)",
    "work, 2, (1, 2)": f"work(rank, world_size) {GIVEN} 2 values of args: too many",
    "work": "work(rank, world_size) cannot be called with 0 values of args: * or pass world_size, unless mpiexec",
    "work(0, 2), 2": "fn is of type NoneType, not a function",
    **{f"work, {size}": f"world_size is {size}; it must be an integer of at least 1" for size in ("'2'", 0, -2)},
    "work, 50_000": "world size 50000 is too large for * cores; pass * at most",
}
MISTAKES |= {f"main({call})": (main_of(f"launch.main({call})"), f"error: {line}") for call, line in CALLS.items()}


@pytest.mark.slow(kept=3, rest=5)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, name):
    text, expected, *how = MISTAKES[name]
    ended = run(tmp_path, text, *how)
    (line,) = ended.stderr.splitlines()
    line = re.sub(r"^((>>>|\.\.\.) )*", "", line)  # of the prompt
    assert ended.code == 2
    assert fnmatchcase(line, f"{expected}*"), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (main_of("launch.spawn(lambda *ranks: None, 2)"), f"<lambda> {NOT_SENT}"),
        (main_of("launch.spawn(work, None)"), "world_size is None; it must be an integer of at least 1"),
        (OTHER + "launch.spawn(work, 3)", NO_GUARD),
    ],
    ids=["a lambda", "no world size", "no guard"],
)
def test_spawn_raises_that_line_without_the_inside_of_multiprocessing(tmp_path, text, expected):
    ended = run(tmp_path, text)
    *trace, line = ended.stderr.splitlines()
    assert ended.code == 1
    assert fnmatchcase(line.partition("Error: ")[2], f"{expected}*"), line
    files = [Path(frame.split('"')[1]).name for frame in trace if frame.startswith("  File ")]
    assert files == ["mistake.py", "spawn.py"]


@pytest.mark.slow
def test_a_script_that_catches_the_error_of_its_missing_guard_starts_nothing_either(tmp_path):
    text = OTHER + "try: launch.spawn(work, 2)\nexcept BaseException as error: print(type(error).__name__)\n"
    ended = run(tmp_path, text)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "RankFailedError\n", "")


IN_A_RANK = "raise ValueError('in a rank only')"
IN_SCRIPT = main_of("launch.main(work, 2)", f"if __name__ != '__main__': {IN_A_RANK}")
ODD = f"def fail(): {IN_A_RANK}\nclass Odd:\n    def __reduce__(self): return fail, ()\ndef take(*ranks): pass"
COULD_NOT = "rank ? (pid *) could not import the script (exit code 1); see its output"
UNPICKLING = main_of("launch.main(take, 2, (Odd(),))", ODD)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        pytest.param(IN_SCRIPT, "ValueError: in a rank only", COULD_NOT, id="in the script"),
        pytest.param(UNPICKLING, "in fail", "ValueError: in a rank only", id="while unpickling"),
    ],
)
def test_errors_of_the_users_own_code_keep_their_traceback(tmp_path, text, cause, line):
    ended = run(tmp_path, text)
    assert ended.code == 1
    assert cause in ended.stderr
    # The other rank may be ended in the middle of a line of its own traceback.
    assert fnmatchcase(ended.stderr.splitlines()[-1], f"*{line}*")


def test_the_exit_code_of_a_missing_guard_may_have_another_reason(tmp_path):
    text = OTHER.replace('print("rank", rank)', "os._exit(os.EX_USAGE)") + guarded("launch.main(work, 1)")
    ended = run(tmp_path, "import os\n" + text)
    assert ended.code == os.EX_USAGE
    assert ended.stderr.endswith("left with exit code 64 without a traceback\n")


# -- what looks similar and works --------------------------------------------------------------------------------------
SHARED = """
import multiprocessing
class Trainer:
    def __init__(self, first): self.first = first
    def work(self, rank, world_size, lock, queue, total):
        with lock: total.value += self.first + rank
        queue.put(rank)
"""
PARTIAL = "import functools; launch.main(functools.partial(print, 'a'), 2)"
OF_A_MODULE = "from distopt import launch; import other; launch.main(other.work, 2)"
USE_SHARED = """context = multiprocessing.get_context("spawn")
    queue, total = context.Queue(), context.Value("i")
    launch.main(Trainer(10).work, 2, [context.Lock(), queue, total])
    print(sorted([queue.get(), queue.get()]), total.value)"""


# -- processes that a script starts itself, as SINGA's do --------------------------------------------------------------
SINGA = """
import multiprocessing, sys, time
from distopt import opt, singa_wrap as singa
{before}
def run(local_rank, world_size, nccl_id):
    {first}
    sgd = opt.DistOpt(opt.SGD(lr=0.1), nccl_id=nccl_id, local_rank=local_rank, world_size=world_size)
    sys.stdout.write("rank %d of %d\\n" % (sgd.global_rank, sgd.world_size))

{guard}
    nccl_id = singa.NcclIdHolder()
    process = []
    for local_rank in {numbers}:
        context = multiprocessing.get_context("{method}")
        process.append(context.Process(target=run, args=(local_rank, {size}, {ticket})))
    for p in process:
        p.start()
    for p in process:
        p.join()
    sys.exit(max(p.exitcode for p in process))
"""


def singa(numbers: str, method: str = "fork", **parts: object) -> str:
    usual = {"size": 2, "before": "", "first": "pass", "ticket": "nccl_id", "guard": 'if __name__ == "__main__":'}
    return SINGA.format(**{**usual, "numbers": numbers, "method": method, **parts})


SECOND = "another process joins as rank {} with the same ticket; number the processes of a job 0, 1, ..., "
SECOND += "and make a ticket"
OWN_TICKET = "rank ? has made its ticket itself, so no other rank has it; "
OWN_TICKET += "make one in the process that starts the 2 ranks"
OWN = {"first": "nccl_id = singa.NcclIdHolder()", "ticket": "None"}
OF_SCRIPT = {"before": "ticket = singa.NcclIdHolder()", "first": "nccl_id = ticket", "ticket": "None"}
# The rank 1 of the first job waits until the rank 0 of the second one has failed.
TWO_JOBS = singa("(0, 0, 1)", before="go = multiprocessing.Event()", first="local_rank and go.wait()").replace(
    "        p.start()\n",
    "        p.start()\n    while all(p.is_alive() for p in process): time.sleep(0.01)\n    go.set()\n",
)
SINGA_MISTAKES = {
    "two of rank 1 beside others": (singa("(0, 1, 1)", size=3), SECOND.format(1)),
    "two jobs with one ticket": (TWO_JOBS, SECOND.format(0)),
    "a ticket per rank": (singa("range(2)", **OWN), OWN_TICKET),
    "a ticket of the script": (singa("range(2)", "spawn", **OF_SCRIPT), OWN_TICKET),
}


@pytest.mark.slow(rest=3)
@pytest.mark.parametrize("name", SINGA_MISTAKES)
def test_ranks_that_a_script_starts_itself_say_what_is_wrong(tmp_path, name):
    """Each process has a traceback, which multiprocessing prints; the last lines of all of them are the point."""
    text, expected = SINGA_MISTAKES[name]
    ended = run(tmp_path, text)
    assert ended.code == 1
    lines = re.findall(r"^distopt\.errors\.LaunchError: (.*)", ended.stderr, re.MULTILINE)
    consequences = [line for line in lines if line.endswith("has ended; see the output")]
    assert len(lines) > len(consequences)
    for line in lines:
        assert line in consequences or fnmatchcase(line, f"{expected}*"), line
    assert len(lines) == ended.stderr.count("Traceback")  # none has a second one for its context
    assert sorted(ended.stdout.splitlines()) == (["rank 0 of 2", "rank 1 of 2"] if text == TWO_JOBS else [])


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("count", [2, 3])
def test_no_guard_around_processes_that_a_script_starts_itself(tmp_path, method, count):
    ended = run(tmp_path, singa(f"range({count})", method, size=count, guard="if True:"))
    (line,) = ended.stderr.splitlines()
    assert ended.code == 1
    assert fnmatchcase(line, f"*Process-? {NO_GUARD.removeprefix('rank ? ')}*"), line


ONE_FAILS = "world = distopt.init(nccl_id, local_rank, world_size); world.barrier()\n    "
ONE_FAILS += "if local_rank == 1: raise ValueError('the cause')\n    world.all_reduce(1)"


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_that_a_script_has_started_end_together_with_their_tracebacks(tmp_path, method):
    ended = run(tmp_path, singa("range(3)", method, size=3, before="import distopt", first=ONE_FAILS))
    assert sorted(re.findall(r"^Process \w+-(\d):$", ended.stderr, re.M)) == ["1", "2", "3"]
    assert "\nValueError: the cause\n" in ended.stderr
    assert len(re.findall(r"^.*rank 1 \(host ", ended.stderr, re.M)) >= 2, ended.stderr


TRAIN_FIRST = """
import threading
import numpy as np
from distopt import layer, tensor
from tests.unit.nets import Chain
def train(sgd):
    rng = np.random.default_rng(0)
    x = tensor.from_numpy(rng.standard_normal((512, 500), np.float32))
    y = tensor.from_numpy(rng.integers(0, 3, 512, np.int32))
    net = Chain(linear=layer.Linear(300))
    net.set_optimizer(sgd)
    net.compile([x], is_train=True)
    for _ in range(3): net(x, y)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
train(opt.DistOpt(opt.SGD(lr=0.1)))
"""


BY_MAIN, BY_ITSELF = ["rank 0", "[rank 1] rank 1"], ["rank 0 of 2", "rank 1 of 2"]
TRAINED = singa("range(2)", before=TRAIN_FIRST).replace("    sys.stdout", "    train(sgd)\n    sys.stdout")
OF_BYTES = singa("range(2)", "spawn", ticket="nccl_id.secret", first="nccl_id = singa.NcclIdHolder(nccl_id)")
# by name: a script, what it prints, and how it is run
WORKS = {
    "main twice": (main_of("for _ in range(2): launch.main(work, 2)"), BY_MAIN * 2),
    "a method, and what processes share": (main_of(USE_SHARED, SHARED), ["[0, 1] 21"]),
    "a partial function": (main_of(PARTIAL), ["a 0 2", "[rank 1] a 1 2"]),
    "of a module": (OF_A_MODULE, BY_MAIN, "-c"),
    "in a package": (OF_A_MODULE, BY_MAIN, "-m package"),
    "a fork after training and beside threads": (TRAINED, BY_ITSELF),
    "a ticket sent as bytes": (OF_BYTES, BY_ITSELF),
    "an unused ticket of the script": (singa("range(2)", "spawn", before="ticket = singa.NcclIdHolder()"), BY_ITSELF),
}


@pytest.mark.slow(kept=1, rest=5)
@pytest.mark.parametrize("name", WORKS)
def test_what_works(tmp_path, name):
    text, printed, *how = WORKS[name]
    ended = run(tmp_path, text, *how)
    assert (ended.code, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == sorted(printed)


IN_MAIN = """
import sys, helper
from distopt import launch
class Words: text = helper.TEXT
def work(rank, world_size, words): print("rank", rank, words.text, *sys.argv[1:])
"""


@pytest.mark.slow(kept=1, rest=2)
@pytest.mark.parametrize("launcher", ["main", "run"])
@pytest.mark.parametrize("form", ["package", "folder", "archive"])
def test_main_of_a_package_a_folder_or_an_archive(tmp_path, form, launcher):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "__main__.py").write_text(IN_MAIN + guarded("launch.main(work, 2, (Words(),))"))
    (tmp_path if form == "package" else folder).joinpath("helper.py").write_text("TEXT = 'of a helper'")
    if form == "archive":
        zipapp.create_archive(folder, tmp_path / "job.pyz")
    words = {"package": ["-m", "job"], "folder": ["job"], "archive": ["job.pyz"]}[form]
    command = [PYTHON] if launcher == "main" else [PYTHON, "-m", "distopt", "run", "--nproc-per-node", "2"]
    ended = Program(["env", "-C", str(tmp_path), *command, *words, "a word"]).end()
    assert (ended.code, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["[rank 1] rank 1 of a helper a word", "rank 0 of a helper a word"]
