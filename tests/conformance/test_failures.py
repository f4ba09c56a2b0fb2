"""The errors that ranks get, whatever their transport, when something fails or interrupts them; nothing is left."""

import os
import time
from functools import partial
from itertools import product

import numpy as np
import pytest

from distopt import _core
from distopt.errors import CommunicatorError

from . import nccl_ranks, scenes
from .ranks import OverUcx, OverUcxByHost, connect, needs_ucx, run_ranks_ok, with_ranks

pytestmark = pytest.mark.usefixtures("built")
OVER = {
    "shm": connect,
    "ucx": OverUcx.create,
    "ucx by host": OverUcxByHost.create,
    "nccl": nccl_ranks.connect,
    "nccl, connected": partial(nccl_ranks.connect, CONNECTED="1"),
    "via-host": nccl_ranks.connect_via_host,
}
MARKS = {"ucx": [needs_ucx], "ucx by host": [needs_ucx, pytest.mark.slow, pytest.mark.sweep]}


def over(transports, *given):
    """Cases over transports: what connects the ranks, and `given`."""
    return [pytest.param(OVER[one], *given, marks=MARKS.get(one, ()), id="-".join([one, *given])) for one in transports]


# -- different collectives -------------------------------------------------------------------------
DIFFERENCES = {
    "operation": ("shm", "ucx", "nccl", "via-host"),
    "count": ("shm", "ucx", "nccl"),
    **dict.fromkeys(("empty", "dtype", "reduction", "label", "root"), ("shm", "nccl")),
    **dict.fromkeys(("look", "wire memory"), ("shm",)),
}


@pytest.mark.slow(kept=8)
@pytest.mark.parametrize(
    ("connects", "which"), [case for which, transports in DIFFERENCES.items() for case in over(transports, which)]
)
def test_different_collectives_are_named_on_all_ranks(connects, which):
    for world_size in (2, 3) if connects is connect else (3,):
        scenes.check_difference(connects, which, world_size)


# -- lost peers ------------------------------------------------------------------------------------
WAITS = ["all_reduce", "barrier", "all_gather_ragged"]
LOSSES = [
    *product([("shm",)], ["killed", "exited", "closed"], [*WAITS, "empty"]),
    *product([("ucx", "ucx by host")], ["killed", "exited", "closed"], WAITS),
    *product([("nccl",)], ["killed", "closed"], [*WAITS, "no one"]),
    (("via-host",), "killed", "all_reduce"),
]


@pytest.mark.parametrize(("connects", "how", "waiting_in"), [case for row in LOSSES for case in over(*row)])
def test_survivors_learn_who_was_lost(connects, how, waiting_in):
    scenes.check_loss(connects, how, waiting_in, 4 if connects == OverUcxByHost.create else 3)


@with_ranks(2, connect, lost=[1])
def test_after_a_failure_every_use_tells_the_first_cause(comm, rank):
    array = comm.empty(1000)
    if rank == 1:
        os._exit(0)
    texts = set()
    for call in (comm.barrier, lambda: comm.all_reduce(array), comm.barrier, lambda: comm.empty(3)):
        with pytest.raises(CommunicatorError, match=r"rank 1 \(host") as info:
            call()
        texts.add(str(info.value))
    assert len(texts) == 1
    comm.close()
    array[...] = 1  # the memory outlives the communicator


@with_ranks(3)
def test_a_peer_that_is_done_may_leave_before_the_others_have_noticed(job, rank):
    for _ in range(3):
        comm = connect(job)
        array = comm.empty(10_000)
        for target in (array, np.ones(300_000, np.float32)):
            target[...] = 1
            work = comm.all_reduce(target)
            if rank == 0:
                time.sleep(0.1)
            work.wait()
            assert (target == 3).all()
        comm.close()


# -- late peers, interrupts, forks -----------------------------------------------------------------
@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("connects", over(["shm", "nccl, connected", "nccl", "via-host"]))
def test_a_stalled_peer_is_named_first_in_a_warning_then_in_an_error(connects):
    scenes.check_stall(connects, on_the_device=connects is OVER["nccl, connected"])


@pytest.mark.parametrize("connects", over(["shm", "ucx", "nccl, connected", "via-host"]))
def test_the_late_rank_is_told_that_the_others_gave_up(connects):
    scenes.check_late_ranks(connects)


@pytest.mark.parametrize(
    ("connects", "waiting_in"),
    [*over(["shm", "ucx", "nccl, connected"], "all_reduce"), *over(["shm"], "ragged"), *over(["shm"], "message")],
)
def test_ctrl_c_interrupts_a_wait(connects, waiting_in):
    run_ranks_ok(scenes.interrupt, 2, connects, waiting_in)


@pytest.mark.parametrize("connects", over(["shm", "ucx", "nccl"]))
def test_a_forked_child_is_no_rank(connects):
    run_ranks_ok(scenes.fork, 2, connects)


@pytest.mark.parametrize("named_fallback", [False, True])
def test_shared_memory_is_the_owner_s_alone(named_fallback):
    fd = _core.create_segment(2, 4096, named_fallback)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)
