"""`distopt run --heal`: whatever is killed, stopped or cut off, the job ends with the bits of an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.healing import JOB, RUN, Job, without_heal
from tests.faults.ways import can_mount, nearly_full
from tests.processes import ROOT, patience, remove_group

TORCH = ["-m", "tests.torch.resumed", "--every", "1000"]


def undisturbed(*commands: list[str]) -> list[str]:
    return Job(*without_heal(commands)).end()


def paced(end: Path) -> list[str]:
    """Options of a job that is not at its end, however slowly its faults come, before the file `end` exists."""
    return ["--pause", f"{patience(0.02)}", "--until", str(end)]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("folder", [False, True])
def test_killed_and_stopped_ranks_and_those_that_replace_them(start, tmp_path, folder):
    command = [*RUN, "--heal", *JOB, "--steps", "600", *([] if folder else ["--no-shards"])]
    want = undisturbed([*command, "--pause", "0"])
    job = start([*command, *paced(tmp_path / "end"), *(["--folder", str(tmp_path / "saved")] if folder else [])])
    server = job.fork_server()
    for healed, (rank, signum) in enumerate([(1, signal.SIGKILL), (0, signal.SIGSTOP), (0, signal.SIGKILL)]):
        os.kill(job.children(0, "spare")[0], signal.SIGKILL)
        job.more_steps()
        os.kill(job.pid_of(rank), signum)
        job.wait_for("; healed: ", healed + 1)
    spares = job.children(0, "spare")
    os.kill(server, signal.SIGKILL)
    job.fork_server(before=server)
    job.children(0, "spare", without=spares)
    job.more_steps()
    os.kill(job.pid_of(1), signal.SIGKILL)
    (tmp_path / "end").touch()
    assert job.end() == want
    lines = job.wait_for(r"rank (\d) on .* (was ended by SIGKILL|was stopped).*; healed: step (\d+) was done after", 4)
    assert [int(line[1]) for line in lines] == [1, 0, 0, 1]
    starts = [int(line[1]) for line in job.wait_for(r"rank 0 is \d+ after (\d+)")]
    assert len(starts) == 5
    assert starts == sorted(starts)
    assert starts[1] > 0


def test_a_script_that_imports_mpi_itself(start, tmp_path):
    pytest.importorskip("mpi4py")
    script = tmp_path / "own_mpi.py"
    script.write_text("from mpi4py import MPI\nfrom tests.ranks.healed import main\n\nmain()\n")
    command = [*RUN, "--heal", str(script), "--steps", "200"]
    want = undisturbed([*command, "--pause", "0"])
    job = start([*command, *paced(tmp_path / "end")])
    job.fork_server()
    job.more_steps()
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for("; healed: ")
    (tmp_path / "end").touch()
    assert job.end() == want


@pytest.fixture
def frozen_group() -> Iterator[Callable[[int], None]]:
    """Freezes a process by a control group of its own."""
    roots = [Path(root) for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
    root = next((root for root in roots if (root / "cgroup.controllers").exists()), None)
    group = None if root is None else root / f"distopt-test-{os.getpid()}"
    try:
        assert group is not None
        group.mkdir()
    except (AssertionError, OSError):
        pytest.skip("control groups of version 2 cannot be made here")

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(f"{pid}")
        (group / "cgroup.freeze").write_text("1")

    yield freeze
    remove_group(group)


def test_a_frozen_rank(start, frozen_group, tmp_path):
    command = [*RUN, "--heal", *JOB, "--steps", "300"]
    want = undisturbed([*command, "--pause", "0"])
    job = start([*command, *paced(tmp_path / "end")])
    job.more_steps()
    frozen_group(job.pid_of(1))
    (tmp_path / "end").touch()
    assert job.end() == want
    job.wait_for(r"rank 1 on .* was stopped, as by SIGSTOP or the freezer, while others ran; healed: ")


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount")
def test_a_full_disk_ends_the_job(tmp_path):
    run = [*nearly_full(str(tmp_path)), *RUN, "--heal", *JOB, "--steps", "41", "--folder", str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(
        r"step 4\d could not be saved: .*No space left on device.*; so it did before, after step 41$", last
    )


def test_a_script_that_fails_again_at_the_same_step_ends_the_job():
    done = subprocess.run([*RUN, "--heal", *JOB, "--raise-at", "25"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.count("rank 0 is") == 2
    last = done.stderr.splitlines()[-1]
    assert re.search(
        r"rank 1 on .*: ZeroDivisionError: so it is; flight record in \S+; so it did before, after step 25$", last
    ), last


def test_five_attempts_without_a_step_end_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run([*RUN, "--heal", str(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 137
    assert "5 attempts have led to no step after 0" in done.stderr


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("script", [JOB, [*TORCH, "--backend", "gloo"], [*TORCH, "--backend", "distopt"]])
def test_two_hosts_whose_link_is_cut_and_one_of_which_is_lost(start, net, tmp_path, script):
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29483"]
    words = [*RUN, "--heal", *meet, *script, "--steps", "200", "--folder"]
    want = undisturbed(*(host.inside([*words, str(tmp_path / "w"), "--pause", "0"]) for host in net.hosts))
    job = start(*(host.inside([*words, str(tmp_path / "saved"), *paced(tmp_path / "end")]) for host in net.hosts))
    job.wait_for(r"step \d+$")
    os.kill(job.fork_server(1), signal.SIGKILL)
    net.cut(silently=True)
    job.wait_for("node 1 .* cannot be reached.*; waiting for it")
    net.mend()
    job.wait_for("node 1 .* cannot be reached.*; healed: ")
    job.more_steps()
    job.kill_agent(1)  # and its ranks, and what they have kept, with it
    job.wait_for("node 1 .* cannot be reached.*; waiting for it", 2)
    job.start_agent(1)
    job.wait_for("node 1 .* cannot be reached.*; healed: ", 2)
    job.more_steps()
    job.kill_agent(0)
    job.wait_for("the node that owns .* cannot be reached; waiting for it")
    job.start_agent(0)
    job.wait_for("the node that owned the job, .*; healed: ")
    (tmp_path / "end").touch()
    assert job.end() == want


# Its module `place` reads the rank at its import; the working directory has another module of that name.
OWN_MODULES = """
import os, signal
import numpy as np
import distopt, place
from distopt.checkpoint import Checkpoint

world, state = distopt.init(), np.zeros(2)
saved = Checkpoint(None, state=state)
resumed = saved.resume()
end = saved.steps + 3 if resumed else 10**9
while saved.steps < end:
    state += world.all_reduce(1)
    saved.step()
    if not resumed and world.rank == 1 and saved.steps > 8 and os.path.exists(__file__ + ".warm"):
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
saved.close()
print(f"rank {world.rank} imported {place.NAME} as rank {place.RANK}", flush=True)
"""


def test_a_healed_rank_imports_the_modules_of_the_script_itself(start, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for folder, name in ((tmp_path, "another"), (tmp_path / "sub", "its own")):
        (folder / "place.py").write_text(f"import os\nNAME, RANK = {name!r}, os.environ.get('RANK', '0')\n")
    script = tmp_path / "sub" / "train.py"
    script.write_text(OWN_MODULES)
    monkeypatch.chdir(tmp_path)
    job = start([*RUN, "--heal", str(script)])
    job.fork_server()
    (tmp_path / "sub" / "train.py.warm").touch()
    job.wait_for("; healed: ")
    for rank in range(2):
        job.wait_for(f"rank {rank} imported its own as rank {rank}$")


# In attempt 0, rank 1 dies before any rank can have named its modules.
EARLY = """
import os, signal
import heavy, distopt
import numpy as np
from distopt.checkpoint import Checkpoint

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if (rank, attempt) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
world = distopt.init()
saved = Checkpoint(None, state=np.zeros(2))
saved.resume()
for _ in range(5):
    world.barrier()
    saved.step()
saved.close()
print(f"rank {rank} ends", flush=True)
"""


def test_ranks_that_are_killed_before_their_first_step_start_again_warm(start, tmp_path, monkeypatch):
    installed, log = tmp_path / "site-packages", tmp_path / "imports"
    installed.mkdir()
    write = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    (installed / "heavy.py").write_text(f"import os, time\n{write}\ntime.sleep(2)\n")
    (tmp_path / "train.py").write_text(EARLY)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{installed}"}
    done = subprocess.run([*RUN, "--heal", str(tmp_path / "train.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends\n") == 2
    assert "; healed: " in done.stderr
    # By two ranks and the process that forks the next two. Rank 0 may have been ended before. Once a rank has named its
    # modules, another such process imports them, if the job lasts so long.
    assert len(log.read_text().split()) <= 4


def test_modules_that_are_left_to_the_ranks(tmp_path):
    """Those that read a rank's variable, those that import these, the script's own, and those that it replaces."""
    installed, own = tmp_path / "site-packages", tmp_path / "own"
    for folder, name, line in (
        (installed, "asks", "def rank():\n    return os.environ.get('RANK')\nRANK = rank()"),
        (installed, "imports", "try:\n    import asks\nexcept Exception:\n    pass"),
        (installed, "plain", "copy = dict(os.environ)"),
        (installed, "shadowed", ""),
        (own, "shadowed", ""),
        (own, "mine", "import plain"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(f"import os\n{line}\n")
    script = own / "train.py"
    script.write_text("import asks, imports, mine, shadowed\nif 0:\n    import never\n")
    text = (
        "import sys; from pathlib import Path; from distopt.launch.heal import fork_server as s; "
        "own = Path(sys.argv[1]); "
        "names = s.imports_of(own / 'train.py', own); s._import(names, s.Installed(own, s._OF_RANKS)); "
        "print(names, [name for name in names if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{installed}:{own}"}
    done = subprocess.run(
        [sys.executable, "-c", text, str(own)], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    names = ["asks", "imports", "mine", "shadowed", "os", "plain"]
    assert done.stdout == f"{names} {['os', 'plain']}\n"
