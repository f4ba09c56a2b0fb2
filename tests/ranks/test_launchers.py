"""Ranks that torchrun or srun numbered but did not connect: on one host, and on two that are network namespaces."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.ranks import needs_ucx
from tests.processes import ROOT, Program

SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")
MAIN = str(ROOT / "tests" / "ranks" / "launched_main.py")
JOB = 2 * os.getpid()  # no job of another worker has this number or the next
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

needs_torchrun = pytest.mark.skipif(not Path(TORCHRUN).exists(), reason="torchrun is absent: pip install torch")


def slurm(rank: int, size: int, nodes: str, n_nodes: int, job: int = JOB) -> dict[str, str]:
    """The variables that srun sets."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_CLUSTER_NAME": "test",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(n_nodes),
    }


def said(stdout: str) -> list[str]:
    return sorted(re.findall(r"^rank .*$", stdout, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@needs_torchrun
@pytest.mark.parametrize("n", [1, 2, 3])
def test_torchrun_on_one_host_needs_no_mpi(n):
    ended = Program([TORCHRUN, "--standalone", "--nproc-per-node", str(n), SCRIPT, "ok"]).end()
    assert ended.code == 0, ended.stderr
    here, transport = os.uname().nodename, "single" if n == 1 else "shm"
    expected = [f"rank {rank} of {n}, {rank} of {n} on {here}: LaunchedJob {transport} mpi=False" for rank in range(n)]
    assert said(ended.stdout) == expected


def test_srun_on_one_host_and_jobs_that_never_meet():
    programs = [
        Program([sys.executable, SCRIPT, "ok"], slurm(rank, size, "here", 1, job))
        for job, size in ((JOB, 2), (JOB + 1, 3))
        for rank in range(size)
    ]
    ended = [program.end() for program in programs]
    assert [one.code for one in ended] == [0] * 5, ended
    assert [one.stdout.split(",")[0] for one in ended] == [
        f"rank {rank} of {size}" for size in (2, 3) for rank in range(size)
    ]


def test_ranks_of_horovodrun_are_one_job():
    n = 3
    places = {"HOROVOD_RANK": "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK": "HOROVOD_LOCAL_SIZE"}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(JOB)}
    envs = [store | dict.fromkeys(places, str(rank)) | dict.fromkeys(places.values(), str(n)) for rank in range(n)]
    ended = [program.end() for program in [Program([sys.executable, SCRIPT, "ok"], env) for env in envs]]
    assert [one.code for one in ended] == [0] * n, ended
    here = os.uname().nodename
    assert [one.stdout for one in ended] == [
        f"rank {rank} of {n}, {rank} of {n} on {here}: LaunchedJob shm mpi=False\n" for rank in range(n)
    ]


def test_killed_rank_is_named_on_one_host_though_the_others_do_not_communicate():
    programs = [Program([sys.executable, SCRIPT, "SIGKILL"], slurm(rank, 3, "here", 1)) for rank in range(3)]
    programs[0].read_lines(1)
    ended = [program.end() for program in programs]  # they would sleep for longer than it waits
    assert [one.code for one in ended] == [1, 1, -9]
    name = f"rank 2 on {os.uname().nodename} (pid {programs[2].process.pid})"
    assert [one.stderr for one in ended] == [f"{name} has ended before the others; see its output\n", "", ""]


def test_rank_that_has_left_is_not_missed_by_one_that_goes_on():
    programs = [Program([sys.executable, SCRIPT, "outlive"], slurm(rank, 2, "here", 1)) for rank in range(2)]
    ended = [program.end() for program in programs]
    assert [(one.code, one.stderr) for one in ended] == [(0, "")] * 2
    assert ended[1].stdout.endswith("done\n")


@pytest.mark.slow
def test_ranks_that_tcp_does_not_connect_are_warned_and_train(net):
    """A namespace of its own has no interface that is up, not even the loopback."""
    variables = [[f"{name}={value}" for name, value in slurm(rank, 2, "here", 1).items()] for rank in range(2)]
    ranks = [shlex.join(["env", *own, sys.executable, SCRIPT, "ok"]) for own in variables]
    ended = Program(["unshare", "--net", "sh", "-c", f"{ranks[0]} & {ranks[1]} && wait $!"]).end()
    assert ended.code == 0, ended
    assert len(said(ended.stdout)) == 2
    assert re.fullmatch(r"rank 0, 1 cannot reach rank 0 by TCP; the loss of a rank may .*\n", ended.stderr), ended


def on_two_hosts(net, how: str, env: dict[str, str] | None = None) -> list[Program]:
    """One rank on each host, as srun would start them."""
    nodes = net.hosts[0].address
    return [
        Program(host.inside([sys.executable, SCRIPT, how]), {**slurm(rank, 2, nodes, 2), **(env or {})})
        for rank, host in enumerate(net.hosts)
    ]


@needs_ucx
def test_srun_on_two_hosts(net):
    ended = [program.end() for program in on_two_hosts(net, "ok", {"DISTOPT_JOB_SECRET": "s"})]
    assert [one.code for one in ended] == [0, 0], ended
    assert [said(one.stdout) for one in ended] == [
        [f"rank {rank} of 2, 0 of 1 on {host.name}: HostsJob ucx mpi=False"] for rank, host in enumerate(net.hosts)
    ]


def test_exception_on_one_host_ends_both_and_is_shown_once(net):
    ended = [program.end() for program in on_two_hosts(net, "raise")]
    assert [one.code for one in ended] == [1, 1]
    assert ended[1].stderr.rstrip().endswith("ValueError: the cause")
    assert "Traceback" not in ended[0].stderr


@needs_ucx
@pytest.mark.slow
@needs_torchrun
def test_torchrun_on_two_hosts(net):
    programs = []
    for number, host in enumerate(net.hosts):
        meet = ["--node-rank", str(number), "--master-addr", net.hosts[0].address, "--master-port", "29555"]
        program = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--local-addr", host.address, *meet, SCRIPT]
        programs.append(Program(host.inside([*program, "ok"])))
    ended = [program.end() for program in programs]
    assert [one.code for one in ended] == [0, 0], ended
    assert said(ended[0].stdout + ended[1].stdout) == [
        f"rank {2 * number + local} of 4, {local} of 2 on {host.name}: HostsJob hierarchical mpi=False"
        for number, host in enumerate(net.hosts)
        for local in range(2)
    ]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("n", [2, 3])
def test_main_under_a_launcher_joins_or_refuses_and_never_nests(n):
    programs = [Program([sys.executable, MAIN, str(n)], slurm(rank, 2, "here", 1)) for rank in range(2)]
    ended = [program.end() for program in programs]
    if n == 2:
        assert [one.stdout for one in ended] == [f"rank {rank} of 2: sum 3\n" for rank in range(2)], ended
    else:
        assert [one.code for one in ended] == [2, 2]
        said = {one.stderr for one in ended} - {""}  # of one that starts much later, too
        assert len({line.replace("SLURM_PROCID=1", "SLURM_PROCID=0") for line in said}) == 1, ended
        assert all(re.fullmatch(r"error: srun has started 2 ranks .*\n", line) for line in said), ended


def test_script_alone_in_a_job_of_several_tasks_is_warned_once():
    env = {name: value for name, value in slurm(0, 4, "here", 1).items() if name != "SLURM_STEP_ID"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "ok"], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    assert done.stderr == (
        "this process trains alone, although its Slurm job has 4 tasks; start all of them by: "
        f"srun python {shlex.quote(SCRIPT)} ok\n"
    )


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("transport", ["mpi", "hierarchical"])
def test_mpi_between_hosts_needs_mpiexec(net, transport):
    ended = [program.end() for program in on_two_hosts(net, "ok", {"DISTOPT_TRANSPORT": transport})]
    assert all(one.code != 0 for one in ended), ended
    assert all("start the script with mpiexec" in one.stderr for one in ended), ended
