"""Other users and programs of the host and the network, which do what they like to a job's sockets."""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, Program
from tests.ranks.test_launchers import said, slurm

SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")
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
    program = Program([sys.executable, SCRIPT, "ok"], env)
    try:
        while not names_of(program, listening=True):
            assert program.process.poll() is None, "rank 0 listens nowhere"
            time.sleep(0.02)
        return names_of(program, listening=listening)
    finally:
        program.kill()
        program.process.communicate()


@pytest.mark.slow(kept=1)
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes privileges")
@pytest.mark.parametrize("names", ["the abstract name on which rank 0 listens", "all abstract names of rank 0"])
def test_names_that_another_user_has_taken_are_told_and_others_are_used(names):
    job = random.randrange(1 << 30)
    numbers = [slurm(rank, 2, "here", 1, job) for rank in range(2)]
    taken = names_of_job(numbers[0], listening=not names.startswith("all"))
    with subprocess.Popen([sys.executable, "-c", OCCUPY, str(NOBODY), *taken], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"listening\n"
            programs = [Program([sys.executable, SCRIPT, "ok"], env) for env in numbers]
            ended = [program.end() for program in programs]
        finally:
            other.kill()
    assert [one.code for one in ended] == [0, 0], ended
    assert [len(said(one.stdout)) for one in ended] == [1, 1]
    assert "another user" in ended[0].stderr


@pytest.mark.slow
def test_a_scan_of_all_ports_does_not_disturb_a_job_at_work(net):
    """A scan connects to every port of rank 0's host, and sends bytes that are not distopt's."""
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29451"]
    run = [sys.executable, "-m", "distopt", "run", *meet, SCRIPT, "stay"]
    programs = [Program(host.inside(run)) for host in net.hosts]
    for program in programs:
        program.read_lines(1)
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
    ended = [program.end() for program in programs]
    assert [one.code for one in ended] == [143, 143], ended


@pytest.mark.slow
def test_a_flood_of_silent_connections_does_not_keep_nodes_from_meeting(port):
    """More of them than a gate hears side by side."""
    run = [sys.executable, "-m", "distopt", "run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    owner = Program([*run, SCRIPT, "ok"])
    links: list[socket.socket] = []
    try:
        while len(links) < 100:
            link = socket.socket()
            links.append(link)
            while link.connect_ex(("127.0.0.1", port)) != 0:
                assert owner.process.poll() is None, "nobody listens"
                time.sleep(0.02)
        other = Program([*run, SCRIPT, "ok"])
        ended = [program.end() for program in (owner, other)]
    finally:
        for link in links:
            link.close()
    assert [one.code for one in ended] == [0, 0], ended
