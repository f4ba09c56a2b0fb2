"""Where the nodes of `distopt run` meet: names, numbers, addresses, and slow ways to them."""

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import ROOT, Program
from tests.ranks.test_launchers import slurm

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

RUN = [sys.executable, "-m", "distopt", "run"]
SCRIPT = str(ROOT / "tests" / "ranks" / "launched_script.py")
VARIABLES = str(ROOT / "tests" / "ranks" / "run_script.py")


@pytest.mark.slow
# -- names and numbers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)], ids=["node 0 owns the endpoint", "node 1 owns the endpoint"])
def test_nodes_with_the_same_host_name_meet(net, numbers):
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29461", "--node-rank"]
    programs = [
        Program(replace(host, name="clone").inside([*RUN, *meet, str(number), SCRIPT, "ok"]))
        for host, number in zip(net.hosts, numbers, strict=True)
    ]
    ended = [program.end() for program in programs]
    assert [one.code for one in ended] == [0, 0], ended
    said = sorted(found for one in ended for found in re.findall(r"rank \d of 2, \d of \d on clone", one.stdout))
    assert said == ["rank 0 of 2, 0 of 1 on clone", "rank 1 of 2, 0 of 1 on clone"]


def test_a_program_that_listens_and_says_nothing_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:
        meet = ["--nnodes", "2", "--rdzv-timeout", "1", "--rdzv-endpoint", f"localhost:{other.getsockname()[1]}"]
        ended = Program([*RUN, *meet, VARIABLES, "variables"]).end()
    assert ended.code == 2
    assert "has not answered as distopt run does within 1 s; if it is another, give" in ended.stderr


def test_nodes_meet_at_an_ipv6_address_in_brackets(port):
    command = [*RUN, "--nnodes", "2", "--rdzv-endpoint", f"[::1]:{port}", VARIABLES, "variables"]
    ended = [program.end() for program in [Program(command), Program(command)]]
    assert [one.code for one in ended] == [0, 0], ended


VALUES = """
import os
from distopt.launch import launcher
from distopt.launch.rendezvous.key_value import client_of_endpoint
info = launcher()
client = client_of_endpoint(info, 60.0)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("all", *client.all_gather(b"%d" % (10 * info.rank)), attempt)
if attempt == "0":
    raise SystemExit(3 if info.rank == 2 else client.get("none sets it"))
client.set(f"own/{info.rank}", attempt.encode())
print("living", client.gather_living("own/"))
"""


def test_ranks_of_two_nodes_exchange_values_at_the_endpoint_and_anew_when_they_start_again(port, tmp_path):
    script = tmp_path / "values.py"
    script.write_text(VALUES)
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-endpoint", f"localhost:{port}"]
    ended = [program.end() for program in [Program([*RUN, *meet, str(script)]) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    said = re.sub(r"^\[rank \d\] ", "", "".join(one.stdout for one in ended), flags=re.M).splitlines()
    living = "living {0: b'1', 1: b'1', 2: b'1', 3: b'1'}"
    everyone = "all b'0' b'10' b'20' b'30'"
    assert sorted(said) == sorted([f"{everyone} 0", f"{everyone} 1", living] * 4), ended


# -- slow ways ---------------------------------------------------------------------------------------------------------
class SlowWay:
    """Passes on what is sent to a port of its own, in both directions, after some seconds: as a long line does."""

    def __init__(self, to: int, seconds: float) -> None:
        self._to, self._seconds = to, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # no listener yet
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        parts: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def send() -> None:
            part = b"-"
            while part:
                at, part = parts.get()
                time.sleep(max(0.0, at - time.monotonic()))
                with contextlib.suppress(OSError):  # its end has been noticed by the other side, or will be
                    target.sendall(part) if part else target.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        part = b"-"
        while part:
            try:
                part = source.recv(1 << 16)
            except OSError:
                part = b""
            parts.put((time.monotonic() + self._seconds, part))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 1.2])
def test_a_node_far_away_joins(port, seconds):
    way = SlowWay(port, seconds)
    try:
        meet = ["--nnodes", "2", "--rdzv-timeout", "100", "--rdzv-endpoint"]
        programs = [
            Program([*RUN, *meet, f"127.0.0.1:{each}", VARIABLES, "variables"], {"DISTOPT_JOB_SECRET": "s"})
            for each in (port, way.port)
        ]
        ended = [program.end() for program in programs]
    finally:
        way.close()
    assert [one.code for one in ended] == [0, 0], ended
    assert not any("another --rdzv-id" in one.stderr for one in ended)


# -- words -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_rank_0_does_not_lose_itself():
    """Its helpers, which watch the other ranks, are killed."""
    programs = [Program([sys.executable, SCRIPT, "stay"], slurm(rank, 2, "here", 1)) for rank in range(2)]
    for program in programs:
        program.read_lines(1)
    pid = programs[0].process.pid
    helpers = [int(x) for task in Path(f"/proc/{pid}/task").iterdir() for x in (task / "children").read_text().split()]
    for helper in helpers:
        os.kill(helper, signal.SIGKILL)
    if not helpers:
        programs[0].process.terminate()
    ended = [program.end() for program in programs]
    assert ended[0].code != 0
    assert not re.search("rank 0 .*has lost rank 0", ended[0].stderr)


def test_an_endpoint_that_names_this_host_twice_is_refused(port):
    meet = ["--heal", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port},127.0.0.2:{port}"]
    ended = Program([*RUN, *meet, VARIABLES, "variables"]).end()
    assert ended.code == 2
    assert "are this one, at the same port; give each once" in ended.stderr
