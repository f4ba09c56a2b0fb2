"""Which interface carries the data of a process group, on hosts with several: network namespaces that a cable joins."""

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend
from benchmarks.networks.emulation import (
    LINK,
    Host,
    HostsUnavailableError,
    bring_up,
    namespaces,
    require_tools,
    wait_for_link,
)

from .forked import CONTEXT, Place

PORT = 29_700
SECONDS = 60.0
_marks = count()


def ip(host: Host, *words: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, *words], check=True)


def add(host: Host, name: str, address: str, *, bridge: bool = False) -> None:
    """An interface that leads nowhere, before the cable in the kernel's order: a cable to itself, or a bridge of it."""
    end = "port" if bridge else name
    if bridge:
        ip(host, "link", "add", name, "type", "bridge")
        ip(host, "link", "set", name, "up")
    ip(host, "link", "add", end, "type", "veth", "peer", "name", "end")
    ip(host, "link", "set", "end", "up")
    ip(host, "link", "set", end, "up", *(["master", name] if bridge else []))
    ip(host, "address", "add", address, "dev", name)


@contextmanager
def cabled(others: str = "") -> Iterator[tuple[Host, ...]]:
    """Two hosts. Other interfaces come before the cable, so that the kernel lists them first."""
    try:
        require_tools("ip", "unshare")
    except HostsUnavailableError as error:
        pytest.skip(str(error))
    with namespaces(2, f"-if{next(_marks)}") as hosts:
        for number, host in enumerate(hosts):
            if others == "bridges":
                add(host, "docker0", "172.17.0.1/16", bridge=True)
            elif others == "other networks":
                add(host, "other", f"10.9.{number}.1/24")
        peer = ["peer", "name", LINK, "netns", hosts[1].namespace]
        subprocess.run(["ip", "link", "add", LINK, "netns", hosts[0].namespace, "type", "veth", *peer], check=True)
        bring_up(hosts)
        wait_for_link(hosts)
        for number, host in enumerate(hosts if others == "IPv6 alone" else ()):
            ip(host, "address", "flush", "dev", LINK, "scope", "global")
            ip(host, "address", "add", f"fd00::{number + 1}/64", "dev", LINK, "nodad")
        yield hosts


def rank_main(rank: int, method: str, out: Connection) -> None:
    """Sum twice, the second time what needs several messages; the error of either, or where the bytes went."""
    try:
        dist.init_process_group("distopt", init_method=method, rank=rank, world_size=2, timeout=timedelta(0, SECONDS))
        for length in (3, 500_000):
            tensor = torch.arange(float(length)) * (rank + 1)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(float(length)) * 3)
        dist.destroy_process_group()
        out.send([socket.gethostname(), used()])
    except dist.DistBackendError as error:
        out.send(["error", str(error)])


def forks(rank: int, method: str, out: Connection) -> None:
    """A worker, as that of a loader, makes a group with the other rank's, twice, and so does a child of it."""
    rank_main(rank, f"{method}0", out)
    worker = CONTEXT.Process(target=in_worker, args=(rank, method, out))
    worker.start()
    worker.join()
    rank_main(rank, f"{method}4", out)


def in_worker(rank: int, method: str, out: Connection) -> None:
    for number in (1, 2):
        rank_main(rank, f"{method}{number}", out)
    last = CONTEXT.Process(target=rank_main, args=(rank, f"{method}3", out))
    last.start()
    last.join()


def used() -> list[str]:
    """The interfaces, apart from the loopback, that have sent a part of a large sum."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return [name.strip() for name, numbers in lines if int(numbers.split()[8]) > 1_000_000 and name.strip() != "lo"]


def outcomes(
    hosts: Sequence[Host], method: str, main: Callable[..., None] = rank_main, answers: int = 1
) -> list[list[object]]:
    """All that the ranks say, those of the first host first."""
    ends, ranks = [], []
    for rank, host in enumerate(hosts):
        end, start = CONTEXT.Pipe(duplex=False)
        ranks.append(CONTEXT.Process(target=Place._run, args=(host, main, rank, method, start)))
        ranks[-1].start()
        start.close()
        ends.append(end)
    try:
        return [end.recv() if end.poll(2 * SECONDS) else ["no answer"] for end in ends for _ in range(answers)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize(
    ("others", "place"),  # of `init_process_group`; {folder}: where both ranks find a file
    [
        ("bridges", f"tcp://10.213.77.1:{PORT}"),
        ("bridges", "file://{folder}/store"),
        ("other networks", "file://{folder}/store"),
        ("IPv6 alone", f"tcp://[fd00::1]:{PORT}"),
        ("IPv6 alone", "file://{folder}/store"),
    ],
)
def test_the_interface_that_leads_to_the_other_host(others: str, place: str, tmp_path: Path) -> None:
    with cabled(others) as hosts:
        found = outcomes(hosts, place.format(folder=tmp_path))
        assert found == [[host.name, [LINK]] for host in hosts], json.dumps(found)


@pytest.mark.slow
def test_groups_of_workers_that_ranks_have_forked(tmp_path: Path) -> None:
    with cabled() as hosts:
        found = outcomes(hosts, f"file://{tmp_path}/store", forks, answers=5)
        assert found == [[host.name, [LINK]] for host in hosts for _ in range(5)], json.dumps(found)
