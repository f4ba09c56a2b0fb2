"""Emulated hosts far apart: delay, rate, queue and loss of their link, the command on them, and their end."""

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.networks import far
from benchmarks.networks.emulation import HostsUnavailableError
from benchmarks.networks.far import Link, far_hosts
from tests.processes import Program, end_all, or_skipped

NUMBERS = itertools.count()  # in the names of hosts
HOSTS = [sys.executable, "-m", "benchmarks", "hosts"]
N_BYTES, HEADERS_BYTES = 1000, 28  # of a datagram, and of IP and UDP
# Prints when each datagram arrives, by its number, until none comes for long.
RECEIVE = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.bind(("", 5000))
print("ready", flush=True)
while (message := peer.recv(2000))[0]:
    print(message[0], time.monotonic())
"""
# Prints when it begins, and sends that many datagrams; those of number 0 end the receiver, and one of many will arrive.
SEND = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.connect((sys.argv[1], 5000))
print(time.monotonic())
for i in range(int(sys.argv[2])):
    peer.send(bytes([1 + i]) * {N_BYTES})
time.sleep(float(sys.argv[3]))
for _ in range(100):
    peer.send(bytes(1))
    time.sleep(0.01)
""".replace("{N_BYTES}", str(N_BYTES))


@pytest.fixture
def hosts_of():
    """A function that makes hosts with a link between them."""
    with ExitStack() as stack:

        def make(count: int, link: Link) -> Sequence:
            return stack.enter_context(or_skipped(far_hosts(count, link, f"-test{next(NUMBERS)}")))

        yield make


def send(hosts: Sequence, count: int, pause: float = 0.0) -> tuple[float, dict[int, float]]:
    """When the first host begins to send the last one `count` datagrams, and when each arrives, by its number."""
    receiver = Program(hosts[-1].inside([sys.executable, "-c", RECEIVE]))
    assert receiver.read_lines(1) == ["ready"]
    words = [sys.executable, "-c", SEND, hosts[-1].address, str(count), str(pause)]
    # The receiver may be gone when the last of the datagrams that end it come.
    sent, (received,) = Program(hosts[0].inside(words)).end(), end_all([receiver])
    assert sent.stdout, sent.stderr
    lines = (line.split() for line in received.stdout.splitlines())
    return float(sent.stdout), {int(number) - 1: float(second) for number, second in lines}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_packet_takes_the_delay_and_the_time_of_its_bytes(hosts_of, count):
    link = Link(0.1, 1e5)
    began, arrived = send(hosts_of(count, link), 10)
    assert [*arrived] == [*range(10)]
    for number, second in arrived.items():
        assert second - began >= link.delay + (number + 1) * (N_BYTES + HEADERS_BYTES) / link.rate


def test_a_full_queue_drops_what_does_not_fit(hosts_of):
    link = Link(0.01, 2e4)  # 200 datagrams take 10 s
    _, arrived = send(hosts_of(2, link), 200, pause=3.0)
    assert link.queue_bytes // (N_BYTES + HEADERS_BYTES) <= len(arrived) < 200
    assert [*arrived] == sorted(arrived)


def test_the_seed_decides_which_packets_are_lost(hosts_of):
    links = (Link(0.01, 1e8, 0.3, seed=5), Link(0.01, 1e8, 0.3, seed=5), Link(0.01, 1e8, 0.3, seed=6))
    first, again, other = ([*send(hosts_of(2, link), 100)[1]] for link in links)
    assert first == again != other
    assert 40 <= len(first) < 100


def test_the_command_runs_on_each_host(hosts_of):
    hosts_of(2, Link(0.01, 1e6))
    show = 'echo "$(hostname) $NODE_RANK $RANK of $WORLD_SIZE, $LOCAL_RANK, $MASTER_ADDR, $GLOO_SOCKET_IFNAME"'
    ended = Program([*HOSTS, "--hosts", "3", "--", "sh", "-c", f"{show}; exit $NODE_RANK"]).end(code=1)
    lines = [f"distopt-{x} {i} {i} of 3, 0, 10.213.77.1, wire" for i, x in enumerate("abc")]
    assert sorted(ended.stdout.splitlines()) == lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_nothing_remains(hosts_of, tmp_path, number):
    hosts_of(2, Link(0.01, 1e6))
    wait = f"touch {tmp_path}/$NODE_RANK; exec sleep 1000"
    program = Program([*HOSTS, "--hosts", "2", "--", "sh", "-c", wait])
    while program.process.poll() is None and len([*tmp_path.iterdir()]) < 2:
        time.sleep(0.02)
    program.end_by(number, 128 + number)
    assert not namespaces(f"distopt-{program.process.pid}")


def test_after_an_exception_nothing_remains(hosts_of):
    hosts_of(2, Link(0.01, 1e6))
    with pytest.raises(ZeroDivisionError), far_hosts(2, Link(0.01, 1e6), "-fails"):
        1 / (not namespaces(f"distopt-{os.getpid()}-fails-b"))
    assert not namespaces("-fails-")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    relays = [child for child in children if Path(f"/proc/{child}/comm").read_text() == "relay\n"]
    assert len(relays) == 1  # of `hosts_of`


def namespaces(part: str) -> list[Path]:
    return [*Path("/run/netns").glob(f"*{part}*")]


@pytest.mark.parametrize(
    ("user", "missing", "device", "reason"),
    [
        (1000, "", "/dev/null", "run this as root"),
        (0, "cc", "/dev/null", "there is no command 'cc'"),
        (0, "", "/dev/net/absent", "no tun devices: /dev/net/absent: No such file or directory"),
    ],
)
def test_the_reason_is_given(monkeypatch, user, missing, device, reason):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/bin/{tool}")
    monkeypatch.setattr(far, "DEVICE", Path(device))
    with pytest.raises(HostsUnavailableError, match=reason), far_hosts(2, Link(0.01, 1e6)):
        pass


def test_a_relay_that_cannot_be_compiled_is_reported(hosts_of, monkeypatch, tmp_path):
    hosts_of(2, Link(0.01, 1e6))
    monkeypatch.setattr(far, "SOURCE", tmp_path / "relay.c")
    with pytest.raises(HostsUnavailableError, match="cc -O2"), far_hosts(2, Link(0.01, 1e6), "-fails"):
        pass
    assert not namespaces("-fails-")
