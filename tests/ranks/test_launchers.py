"""Ranks that torchrun or srun numbered but did not connect: on one host, and on two that are network namespaces."""

import contextlib
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conformance.ranks import needs_ucx
from tests.processes import HERE, LAUNCHED, RUN, Program, end_all

JOB = 2 * os.getpid()  # no job of another worker has this number or the next
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

needs_torchrun = pytest.mark.skipif(not Path(TORCHRUN).exists(), reason="torchrun is absent: pip install torch")


def slurm(rank: int, size: int, nodes: str, n_nodes: int, job: int = JOB) -> dict[str, str]:
    """The variables that srun sets."""
    numbers = {"PROCID": rank, "NTASKS": size, "LOCALID": 0, "JOB_ID": job, "STEP_ID": 0, "CLUSTER_NAME": "test"}
    numbers |= {"STEP_NODELIST": nodes, "STEP_NUM_NODES": n_nodes}
    return {f"SLURM_{name}": str(value) for name, value in numbers.items()}


def said(stdout: str) -> list[str]:
    return sorted(re.findall(r"^rank .*$", stdout, re.MULTILINE))


def on_this_host(n: int, transport: str) -> list[str]:
    """What all ranks of a job say."""
    return [f"rank {rank} of {n}, {rank} of {n} on {HERE}: LaunchedJob {transport} mpi=False" for rank in range(n)]


def started(how: str, env: dict[str, str]) -> Program:
    return Program([sys.executable, LAUNCHED, how], env)


def of_srun(how: str, n: int = 2) -> list[Program]:
    """Ranks of one host."""
    return [started(how, slurm(rank, n, "here", 1)) for rank in range(n)]


@pytest.mark.slow
@needs_torchrun
def test_torchrun_on_one_host_needs_no_mpi():
    ended = Program([TORCHRUN, "--standalone", "--nproc-per-node", "2", LAUNCHED, "ok"]).end(code=0)
    assert said(ended.stdout) == on_this_host(2, "shm")


def test_srun_on_one_host_and_jobs_that_never_meet():
    places = [(rank, size) for size in (2, 3) for rank in range(size)]
    ended = end_all(started("ok", slurm(rank, size, "here", 1, JOB + size)) for rank, size in places)
    assert [one.stdout.split(",")[0] for one in ended] == [f"rank {rank} of {size}" for rank, size in places]


def test_ranks_of_horovodrun_are_one_job():
    n = 3
    places = {"HOROVOD_RANK": "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK": "HOROVOD_LOCAL_SIZE"}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(JOB)}
    envs = [store | dict.fromkeys(places, str(rank)) | dict.fromkeys(places.values(), str(n)) for rank in range(n)]
    ended = end_all(started("ok", env) for env in envs)
    assert [one.stdout for one in ended] == [f"{line}\n" for line in on_this_host(n, "shm")]


def test_killed_rank_is_named_on_one_host_though_the_others_do_not_communicate():
    programs = of_srun("SIGKILL", 3)
    programs[0].read_lines(1)
    ended = end_all(programs, [1, 1, -9])  # they would sleep for longer than it waits
    name = f"rank 2 on {HERE} (pid {programs[2].process.pid})"
    assert [one.stderr for one in ended] == [f"{name} has ended before the others; see its output\n", "", ""]


def test_rank_that_has_left_is_not_missed_by_one_that_goes_on():
    ended = end_all(of_srun("outlive"))
    assert [one.stderr for one in ended] == ["", ""]
    assert ended[1].stdout.endswith("done\n")


@pytest.mark.slow
def test_ranks_that_tcp_does_not_connect_are_warned_and_train(net):
    """A namespace of its own has no interface that is up, not even the loopback."""
    variables = [[f"{name}={value}" for name, value in slurm(rank, 2, "here", 1).items()] for rank in range(2)]
    ranks = [shlex.join(["env", *own, sys.executable, LAUNCHED, "ok"]) for own in variables]
    ended = Program(["unshare", "--net", "sh", "-c", f"{ranks[0]} & {ranks[1]} && wait $!"]).end(code=0)
    assert len(said(ended.stdout)) == 2
    assert re.fullmatch(r"rank 0, 1 cannot reach rank 0 by TCP; the loss of a rank may .*\n", ended.stderr), ended


def on_two_hosts(net, how: str, env: dict[str, str] | None = None) -> list[Program]:
    """One rank on each host, as srun would start them."""
    command, variables = [sys.executable, LAUNCHED, how], env or {}
    numbers = [slurm(rank, 2, net.hosts[0].address, 2) for rank in range(2)]
    return [Program(host.inside(command), own | variables) for host, own in zip(net.hosts, numbers, strict=True)]


@needs_ucx
def test_srun_on_two_hosts(net):
    ended = end_all(on_two_hosts(net, "ok", {"DISTOPT_JOB_SECRET": "s"}))
    assert [said(one.stdout) for one in ended] == [
        [f"rank {rank} of 2, 0 of 1 on {host.name}: HostsJob ucx mpi=False"] for rank, host in enumerate(net.hosts)
    ]


def test_exception_on_one_host_ends_both_and_is_shown_once(net):
    ended = end_all(on_two_hosts(net, "raise"), 1)
    assert ended[1].stderr.rstrip().endswith("ValueError: the cause")
    assert "Traceback" not in ended[0].stderr


@needs_ucx
@pytest.mark.slow
@needs_torchrun
def test_torchrun_on_two_hosts(net):
    programs = []
    for number, host in enumerate(net.hosts):
        meet = ["--node-rank", str(number), "--master-addr", net.hosts[0].address, "--master-port", "29555"]
        program = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--local-addr", host.address, *meet]
        programs.append(Program(host.inside([*program, LAUNCHED, "ok"])))
    ended = end_all(programs)
    assert said(ended[0].stdout + ended[1].stdout) == [
        f"rank {2 * number + local} of 4, {local} of 2 on {host.name}: HostsJob hierarchical mpi=False"
        for number, host in enumerate(net.hosts)
        for local in range(2)
    ]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("n", [2, 3])
def test_main_under_a_launcher_joins_or_refuses_and_never_nests(n):
    ended = end_all(of_srun(str(n)), 0 if n == 2 else 2)
    if n == 2:
        assert [one.stdout for one in ended] == [f"rank {rank} of 2: sum 3\n" for rank in range(2)], ended
    else:
        said = {one.stderr for one in ended} - {""}  # of one that starts much later, too
        assert len({line.replace("SLURM_PROCID=1", "SLURM_PROCID=0") for line in said}) == 1, ended
        assert all(re.fullmatch(r"error: srun has started 2 ranks .*\n", line) for line in said), ended


def test_script_alone_in_a_job_of_several_tasks_is_warned_once():
    env = {name: value for name, value in slurm(0, 4, "here", 1).items() if name != "SLURM_STEP_ID"}
    assert started("ok", env).end(code=0).stderr == (
        "this process trains alone, although its Slurm job has 4 tasks; start all of them by: "
        f"srun python {shlex.quote(LAUNCHED)} ok\n"
    )


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("transport", ["mpi", "hierarchical"])
def test_mpi_between_hosts_needs_mpiexec(net, transport):
    ended = [program.end() for program in on_two_hosts(net, "ok", {"DISTOPT_TRANSPORT": transport})]
    assert all(one.code != 0 for one in ended), ended
    assert all("start the script with mpiexec" in one.stderr for one in ended), ended


# -- other users and programs, which do what they like to a job's sockets ------------------------------------------
NOBODY = 65534

# As another user, listen on the abstract sockets of these names.
OCCUPY = """
import os, socket, sys, time
os.setuid(int(sys.argv[1]))
listeners = []
for name in sys.argv[2:]:
    listeners.append(socket.socket(socket.AF_UNIX))
    listeners[-1].bind(chr(0) + name)
    listeners[-1].listen(8)
print("listening", flush=True)
time.sleep(1000)
"""


def names_of(program: Program, *, listening: bool) -> list[str]:
    """The abstract names that belong to a program; other jobs may be at work on the host."""
    names = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        words = line.split()  # address, references, protocol, flags, type, state, inode, name
        if len(words) == 8 and words[7].startswith("@") and (words[3] == "00010000" or not listening):
            names[words[6]] = words[7][1:]
    found = []
    for pid in program.pids():
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed, or the process has ended
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
                    found += [names[match[1]]] if match[1] in names else []
    return found


def names_of_job(env: dict[str, str], *, listening: bool) -> list[str]:
    """The names of a job whose rank 0 waits for the others: what another user sees who knows when to look."""
    program = started("ok", env)
    while not names_of(program, listening=True):
        assert program.process.poll() is None, "rank 0 listens nowhere"
        time.sleep(0.02)
    found = names_of(program, listening=listening)
    program.kill()
    program.end()
    return found


@pytest.mark.slow(kept=1)
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes privileges")
@pytest.mark.parametrize("names", ["the abstract name on which rank 0 listens", "all abstract names of rank 0"])
def test_names_that_another_user_has_taken_are_told_and_others_are_used(names):
    job = random.randrange(1 << 30)
    numbers = [slurm(rank, 2, "here", 1, job) for rank in range(2)]
    taken = names_of_job(numbers[0], listening=not names.startswith("all"))
    other = Program([sys.executable, "-c", OCCUPY, str(NOBODY), *taken])
    assert other.read_lines(1) == ["listening"]
    ended = end_all(started("ok", env) for env in numbers)
    other.kill()
    other.end()
    assert [len(said(one.stdout)) for one in ended] == [1, 1]
    assert "another user" in ended[0].stderr


@pytest.mark.slow
def test_a_scan_of_all_ports_does_not_disturb_a_job_at_work(net):
    """A scan connects to every port of rank 0's host, and sends bytes that are not distopt's."""
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29451"]
    programs = [Program(host.inside([*RUN, *meet, LAUNCHED, "stay"])) for host in net.hosts]
    programs = [program.ready(1) for program in programs]
    scan = (
        "import socket, sys\nfound = 0\n"
        "for port in range(1, 1 << 16):\n"
        "    with socket.socket() as link:\n"
        "        link.settimeout(1.0)\n"
        f"        if link.connect_ex(('{net.hosts[0].address}', port)) == 0:\n"
        "            found += 1\n"
        "            link.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n' + bytes(range(256)))\n"
        "print(found)\n"
    )
    done = subprocess.run(net.hosts[1].inside([sys.executable, "-c", scan]), capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 2  # the owner of the endpoint, and a rank's server or UCX
    assert [program.process.poll() for program in programs] == [None, None]
    programs[0].process.terminate()
    end_all(programs, 143)


@pytest.mark.slow
def test_a_flood_of_silent_connections_does_not_keep_nodes_from_meeting(port):
    """More of them than a gate hears side by side."""
    command = [*RUN, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", LAUNCHED, "ok"]
    owner = Program(command)
    with contextlib.ExitStack() as links:
        for _ in range(100):
            link = links.enter_context(socket.socket())
            while link.connect_ex(("127.0.0.1", port)) != 0:
                assert owner.process.poll() is None, "nobody listens"
                time.sleep(0.02)
        end_all([owner, Program(command)])
