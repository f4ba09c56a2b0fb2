"""Outages of the link between two nodes of `distopt run`: of a few seconds, which some connections outlive."""

import re
import subprocess
import sys
import time

import pytest

from benchmarks.networks.emulation import LINK
from tests.processes import ROOT, Program, patience

PORT = 29441
SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")


def job(net) -> list[Program]:
    """One rank on each host, at work."""
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
    command = [sys.executable, "-m", "distopt", "run", *meet, SCRIPT, "stay"]
    programs = [Program(host.inside(command), {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}) for host in net.hosts]
    for program in programs:
        program.read_lines(1)
    return programs


def drop_all_but(net, port: int) -> None:
    """Have the hosts lose every packet from each other but those of one TCP port, by a filter of the kernel."""
    program = (
        (0x28, 0, 0, 12),  # linux/bpf_common.h: load the type of the Ethernet frame
        (0x15, 0, 7, 0x0800),  # other than IPv4: let it pass
        (0x30, 0, 0, 23),  # load the protocol
        (0x15, 0, 6, 6),  # other than TCP: drop it
        (0xB1, 0, 0, 14),  # length of the header
        (0x48, 0, 0, 14),  # load the sender's port
        (0x15, 2, 0, port),  # let it pass
        (0x48, 0, 0, 16),  # load the receiver's port
        (0x15, 0, 1, port),  # let it pass, or drop it
        (0x06, 0, 0, 0),
        (0x06, 0, 0, 2),
    )
    code = f"{len(program)}," + ",".join(" ".join(map(str, line)) for line in program)
    for host in net.hosts:
        tc = ["tc", "-n", host.namespace]
        subprocess.run([*tc, "qdisc", "replace", "dev", LINK, "clsact"], check=True)
        subprocess.run([*tc, "filter", "add", "dev", LINK, "ingress", "bpf", "da", "bytecode", code], check=True)


def filter_gone(net) -> None:
    for host in net.hosts:
        subprocess.run(["tc", "-n", host.namespace, "qdisc", "del", "dev", LINK, "clsact"], check=True)


def assert_goes_on_or_says_why(programs: list[Program], seconds: float) -> None:
    """A job still running after `seconds` continues, and is ended."""
    try:
        programs[0].process.wait(seconds)
    except subprocess.TimeoutExpired:
        programs[0].process.terminate()
    for ended in [program.end() for program in programs]:
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("distopt run: ")]
        assert re.search("cannot be reached|SIGTERM: all 2 ranks have ended", line), line
        assert ended.code == (143 if "SIGTERM" in line else 1)


@pytest.mark.slow
def test_where_only_the_agents_reach_each_other_a_job_goes_on_or_says_why_it_has_ended(net):
    programs = job(net)
    drop_all_but(net, PORT)
    try:
        assert_goes_on_or_says_why(programs, patience(10.0))
    finally:
        filter_gone(net)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 6.5])
def test_after_an_outage_a_job_goes_on_or_says_why_it_has_ended(net, seconds):
    programs = job(net)
    net.cut(silently=False)
    time.sleep(seconds)
    net.mend()
    assert_goes_on_or_says_why(programs, 3.0)


@pytest.mark.slow
def test_a_job_survives_an_outage_of_a_second(net):
    programs = job(net)
    net.cut(silently=False)
    time.sleep(1.0)
    net.mend()
    time.sleep(patience(2.0))
    assert [program.process.poll() for program in programs] == [None, None]
    programs[0].process.terminate()
    assert [program.end().code for program in programs] == [143, 143]
