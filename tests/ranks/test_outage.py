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
