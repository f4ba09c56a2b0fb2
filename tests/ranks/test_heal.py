"""`distopt run --heal`: whatever is killed, stopped or cut off, the job ends with the bits of an undisturbed one."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence

import pytest

from instruments.faults.healing import JOB, RUN, Job, without_heal
from instruments.faults.ways import can_mount, nearly_full
from tests.processes import ROOT, Ended, Program, control_group, patience

TORCH = ["-m", "instruments.torch.resumed", "--every", "1000"]


@pytest.fixture
def disturbed(start, tmp_path):
    """A context with a job that heals and goes on, however slowly its faults come; its end must be an undisturbed one.

    `others`: commands of the undisturbed job, if it has others.
    """

    @contextlib.contextmanager
    def made(*commands: list[str], others: Sequence[list[str]] = ()) -> Iterator[Job]:
        want = Job(*without_heal([[*command, "--pause", "0"] for command in others or commands])).end()
        pace = ["--pause", f"{patience(0.02)}", "--until", str(tmp_path / "end")]
        job = start(*([*command, *pace] for command in commands))
        yield job
        (tmp_path / "end").touch()
        assert job.end() == want

    return made


def run(code: int, *words: str, **env: str) -> Ended:
    """A job of two ranks that heals, to its end."""
    return Program([*RUN, "--heal", *words], env).end(code=code)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("folder", [False, True])
def test_killed_and_stopped_ranks_and_those_that_replace_them(disturbed, tmp_path, folder):
    plain = [*RUN, "--heal", *JOB, "--steps", "600", *([] if folder else ["--no-shards"])]
    command = [*plain, *(["--folder", str(tmp_path / "saved")] if folder else [])]
    with disturbed(command, others=[plain]) as job:
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
    lines = job.wait_for(r"rank (\d) on .* (was ended by SIGKILL|was stopped).*; healed: step (\d+) was done after", 4)
    assert [int(line[1]) for line in lines] == [1, 0, 0, 1]
    starts = [int(line[1]) for line in job.wait_for(r"rank 0 is \d+ after (\d+)")]
    assert len(starts) == 5
    assert starts == sorted(starts)
    assert starts[1] > 0


@pytest.mark.slow
def test_a_script_that_imports_mpi_itself(disturbed, script):
    pytest.importorskip("mpi4py")
    path = script("from mpi4py import MPI\nfrom instruments.faults.healed import main\n\nmain()\n")
    with disturbed([*RUN, "--heal", path, "--steps", "200"]) as job:
        job.fork_server()
        job.more_steps()
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for("; healed: ")


@pytest.mark.slow
def test_a_frozen_rank(disturbed):
    command = [*RUN, "--heal", *JOB, "--steps", "300"]
    with control_group("cgroup.freeze", "0") as group, disturbed(command) as job:
        job.more_steps()
        (group / "cgroup.procs").write_text(f"{job.pid_of(1)}")
        (group / "cgroup.freeze").write_text("1")
    job.wait_for(r"rank 1 on .* was stopped, as by SIGSTOP or the freezer, while others ran; healed: ")


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount")
def test_a_full_disk_ends_the_job(tmp_path):
    job = [*nearly_full(str(tmp_path)), *RUN, "--heal", *JOB, "--steps", "41", "--folder", str(tmp_path)]
    done = Program(job).end(code=1)
    text = r"step 4\d could not be saved: .*No space left on device.*; so it did before, after step 41$"
    assert re.search(text, done.stderr.splitlines()[-1])


def test_a_script_that_fails_again_at_the_same_step_ends_the_job():
    done = run(1, *JOB, "--raise-at", "25")
    assert done.stdout.count("rank 0 is") == 2
    text = r"rank 1 on .*: ZeroDivisionError: so it is; flight record in \S+; so it did before, after step 25$"
    assert re.search(text, done.stderr.splitlines()[-1]), done.stderr


def test_five_attempts_without_a_step_end_the_job(script):
    done = run(137, script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"))
    assert "5 attempts have led to no step after 0" in done.stderr


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("script", [JOB, [*TORCH, "--backend", "gloo"], [*TORCH, "--backend", "distopt"]])
def test_two_hosts_whose_link_is_cut_and_one_of_which_is_lost(disturbed, net, tmp_path, script):
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29483"]
    words = [*RUN, "--heal", *meet, *script, "--steps", "200", "--folder"]
    own, others = ([host.inside([*words, str(tmp_path / name)]) for host in net.hosts] for name in ("saved", "w"))
    with disturbed(*own, others=others) as job:
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


# Of its modules, `plain` alone is imported by the process that forks ranks. The others are the script's own, read the
# rank at their import, or import one that does. The working directory has another `place`, installed packages have
# another `shadowed`.
OWN_MODULES = """
import os, signal
import numpy as np
import distopt, asks, imports, mine, place, plain, shadowed
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
read = " ".join(str(module.RANK) for module in (place, asks, imports, shadowed))
print(f"rank {world.rank} imported {place.NAME} as rank {read}", mine.PID == os.getpid() != plain.PID, flush=True)
"""


def test_a_healed_rank_imports_modules_of_the_script_and_those_that_read_its_variables_itself(
    start, tmp_path, monkeypatch
):
    installed, own = tmp_path / "site-packages", tmp_path / "sub"
    for folder, name, line in (
        (tmp_path, "place", "NAME, RANK = 'another', None"),
        (installed, "shadowed", "RANK = None"),
        (own, "shadowed", "RANK = os.environ.get('RANK')"),
        (own, "mine", "PID = os.getpid()"),
        (installed, "plain", "PID, copy = os.getpid(), dict(os.environ)"),
        (own, "place", "NAME, RANK = 'its own', os.environ.get('RANK')"),
        (installed, "asks", "def rank():\n    return os.environ.get('RANK')\nRANK = rank()"),
        (installed, "imports", "try:\n    from asks import RANK\nexcept Exception:\n    RANK = None"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(f"import os\n{line}\n")
    script = own / "train.py"
    script.write_text(OWN_MODULES)
    monkeypatch.chdir(tmp_path)
    job = start(["env", f"PYTHONPATH={ROOT}:{installed}:{own}", *RUN, "--heal", str(script)])
    job.fork_server()
    (own / "train.py.warm").touch()
    job.wait_for("; healed: ")
    for rank in range(2):
        job.wait_for(f"rank {rank} imported its own as rank {rank} {rank} {rank} {rank} True$")


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


def test_ranks_that_are_killed_before_their_first_step_start_again_warm(script, tmp_path):
    installed, log = tmp_path / "site-packages", tmp_path / "imports"
    installed.mkdir()
    write = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    (installed / "heavy.py").write_text(f"import os, time\n{write}\ntime.sleep(2)\n")
    done = run(0, script(EARLY), PYTHONPATH=f"{ROOT}:{installed}")
    assert done.stdout.count("ends\n") == 2
    assert "; healed: " in done.stderr
    # By two ranks and the process that forks the next two. Rank 0 may have been ended before. Once a rank has named its
    # modules, another such process imports them, if the job lasts so long.
    assert len(log.read_text().split()) <= 4
