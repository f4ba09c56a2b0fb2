"""Messages in shared memory: failures, and concurrent operations."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from distopt.errors import CommunicatorClosedError, MismatchError, StalledError, UsageError
from distopt.settings import Settings

from .ranks import connect, run_ranks, with_ranks

LARGE = 3_000_001


def disagree(job, sent):
    comm = connect(job)
    if job.topology.rank == 0:
        comm.receive(np.zeros(5, np.float32), tag=3).wait()
    elif job.topology.rank == 1:
        comm.send(sent, 0, tag=3).wait()
    comm.barrier()


@pytest.mark.parametrize("sent", [np.zeros(5), np.zeros(6, np.float32)], ids=["type", "count"])
def test_a_receiver_that_expects_something_else(sent):
    outcomes = run_ranks(disagree, 3, sent)
    assert [o.error for o in outcomes] == ["MismatchError"] * 3
    host = os.uname().nodename
    assert f"rank 1 (host {host}, pid {outcomes[1].pid}) sent {sent.size} {sent.dtype} with tag 3" in outcomes[2].text
    assert f"rank 0 (host {host}, pid {outcomes[0].pid}) receives 5 float32;" in outcomes[2].text


FIRST = ("receive", "its wait", "its done", "other wait", "other done", "send", "collective")


@pytest.mark.parametrize("first", [*FIRST, "poll of a collective", "large collective", "progress", "thread"])
@with_ranks(2, connect)
def test_after_a_mismatch_every_call_raises_it(comm, job, rank, first):
    """Rank 0 sends 4 numbers, then 3; rank 1 awaits 2 and 3 of them, and `first` is the call that finds it out."""
    sent_before = first == "receive"
    if rank == 0:
        if not sent_before:
            job.all_gather(b"rank 1 has called receive")
        work = comm.send(np.ones(4), 1)
        comm.send(np.ones(3), 1, tag=1)
        job.all_gather(b"sent")
        job.all_gather(b"rank 1 has met it")
        for call in (comm.barrier, lambda: comm.send(np.ones(3), 1).wait()):
            with pytest.raises(MismatchError):
                call()
        work.wait()  # it had ended before
        return
    if sent_before:
        job.all_gather(b"sent")
    arrays = np.zeros(2), np.zeros(3)
    works = [comm.receive(array, 0, tag=tag) for tag, array in enumerate(arrays)]
    calls = {
        "receive": works[0].wait,
        "its wait": works[0].wait,
        "its done": works[0].done,
        "other wait": works[1].wait,
        "other done": works[1].done,
        "send": lambda: comm.send(np.ones(3), 0).wait(),
        "collective": comm.barrier,
        "poll of a collective": lambda: poll(comm.all_reduce(np.ones(3))),
        "large collective": lambda: comm.all_reduce(np.ones(LARGE)).wait(),
    }
    texts = []

    def call(name):
        with pytest.raises(MismatchError) as info:
            calls[name]()
        texts.append(str(info.value))

    names = ("its wait", "other wait") if first == "thread" else ()
    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    if not sent_before:
        job.all_gather(b"rank 1 has called receive")
        job.all_gather(b"sent")
    for thread in threads:
        thread.join()
    if first == "send":
        comm.send(np.ones(3), 0)
    elif first == "progress":
        comm.progress()
    elif first != "thread":
        call(first)
    job.all_gather(b"rank 1 has met it")
    for name in (*calls, *calls):
        call(name)
    assert len(texts) >= 2 * len(calls)
    assert len(set(texts)) == 1
    assert "sent 4 float64 with tag 0, where rank 1" in texts[0]
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("count", [4, LARGE])
@with_ranks(2, connect)
def test_a_message_that_comes_before_it_is_awaited_must_suit(comm, job, rank, count):
    """It lies aside, all of it or as much as there is room for, since another one was awaited first."""
    if rank == 0:
        comm.send(np.ones(count), 1)
        job.all_gather(b"sent")
        job.all_gather(b"rank 1 has met it")
        with pytest.raises(MismatchError):
            comm.barrier()
        return
    job.all_gather(b"sent")
    comm.receive(np.zeros(3), 0, tag=1)  # takes what has come
    work = comm.receive(array := np.zeros(count - 1), 0)
    with pytest.raises(MismatchError, match=f"sent {count:,} float64 with tag 0, where rank 1"):
        work.wait()
    assert not array.any()
    job.all_gather(b"rank 1 has met it")


def lose_rank_1(job, how, waiting):
    comm = connect(job)
    array = np.zeros(LARGE, np.float32)
    if job.topology.rank == 1:
        comm.send(array[:100], 0).wait()  # arrives nevertheless
        comm.send(array, 0, tag=1)  # a part of it
        if how == "closed":
            comm.close()
            return
        os.kill(os.getpid(), signal.SIGKILL)
    if job.topology.rank == 0:
        time.sleep(0.3)
        comm.receive(array[:100], 1).wait()
        if waiting == "send":
            comm.send(array, 1).wait()
        comm.receive(array, None if waiting == "anyone" else 1, tag=1).wait()
    comm.receive(array, 0).wait()


@pytest.mark.parametrize(
    ("how", "waiting"), [*product(["killed"], ["receive", "anyone", "send"]), *product(["closed"], ["receive", "send"])]
)
def test_a_lost_rank_is_named(how, waiting):
    error = "PeerLostError" if how == "killed" else "CommunicatorClosedError"
    first, lost, last = run_ranks(lose_rank_1, 3, how, waiting)
    assert (first.error, last.error) == (error, error)
    for outcome in (first, last):
        assert f"rank 1 (host {os.uname().nodename}, pid {lost.pid})" in outcome.text
        assert ("waits to send" if waiting == "send" else "waits to receive 3,000,001 float32") in outcome.text


@with_ranks(2)
def test_a_stalled_sender_is_named(job, rank):
    comm = connect(job, Settings(timeout=1.0, stall_warning=50.0))
    job.all_gather(b"")
    if rank == 0:
        with pytest.raises(TimeoutError, match=r"no answer within 1 s") as info:
            comm.receive(np.zeros(7, np.int16), 1, tag=-4).wait()
        assert "waits to receive 7 int16 with tag -4 from rank 1 (host" in str(info.value)
        assert "it has started no operation" in str(info.value)
    job.all_gather(b"")


def poll(work):
    while not work.done():
        time.sleep(1e-3)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("polled", ["message", "collective"])
@with_ranks(3)
def test_a_rank_that_polls_is_not_to_blame(job, rank, polled):
    """Rank 0 waits for both others; rank 1 is about to come, but polls what rank 2 is to send or to start first."""
    comm = connect(job, Settings(timeout=2.0, stall_warning=50.0))
    job.all_gather(b"")
    if rank == 0:
        work = comm.receive(np.zeros(7), tag=5) if polled == "collective" else comm.all_reduce(np.zeros(7))
        with pytest.raises(StalledError, match=r"no answer within 2 s") as info:
            work.wait()
        assert [one.rank for one in info.value.ranks] == [2]
        if polled == "message":
            assert "for rank 2 (host" in str(info.value)
            assert "rank 1" not in str(info.value)
    elif rank == 1:
        work = comm.receive(np.zeros(7), 2) if polled == "message" else comm.all_reduce(np.zeros(7))
        with pytest.raises(StalledError):  # that of rank 0
            poll(work)
    job.all_gather(b"")


def beside_collectives(comm, rank, n):
    """One thread in collectives, another one in messages."""

    def pass_on():
        for i in range(200):
            count = 1 + 997 * (i % 50)
            sent = comm.send(np.arange(count) + rank + i, (rank + 1) % n, tag=i % 3)
            came = np.empty(count, np.int64)
            comm.receive(came, (rank - 1) % n, tag=i % 3).wait()
            sent.wait()
            assert (came == np.arange(count) + (rank - 1) % n + i).all(), i

    with ThreadPoolExecutor(1) as threads:
        passed = threads.submit(pass_on)
        for i in range(300):
            array, expected = np.full(1 + 200 * (i % 7), rank + i, np.float64), n * i + n * (n - 1) / 2
            comm.all_reduce(array).wait()
            assert (array == expected).all()
        passed.result()
    comm.barrier()


@with_ranks(3, connect)
def test_another_thread_may_be_in_a_collective(comm, rank):
    beside_collectives(comm, rank, 3)
    if rank < 2:
        beside_collectives(comm.subgroup([0, 1]), rank, 2)


@with_ranks(2, connect)
def test_messages_and_collectives_move_each_other(comm, rank):
    """A wait for a message moves the collective that another rank needs first, and the other way round."""
    reduced, array = np.full(LARGE, 1.0), np.arange(LARGE)
    for i in range(4):
        if rank == 0:
            work, sent = comm.all_reduce(reduced), comm.send(array + i, 1)
            comm.receive(np.zeros(3), 1).wait()
            work.wait()
            sent.wait()
        else:
            came = np.empty(LARGE, np.int64)
            received = comm.receive(came, 0)
            comm.all_reduce(reduced).wait()
            comm.send(np.zeros(3), 0).wait()
            received.wait()
            assert (came == array + i).all()
        assert (reduced == 2.0 ** (i + 1)).all()
    comm.barrier()


@pytest.mark.slow
@with_ranks(2, connect)
def test_several_threads_may_send_and_receive(comm, job, rank):
    """Each waits for what its peer sends only after it has got something from another thread of this rank."""
    arrays = [np.zeros(LARGE) for _ in range(4)]
    started = threading.Barrier(5)

    def receive(tag):
        work = comm.receive(arrays[tag], 1 - rank, tag=tag)
        started.wait()
        work.wait()

    with ThreadPoolExecutor(4) as threads:
        received = threads.map(receive, range(4))
        started.wait()
        time.sleep(0.5)
        for _ in range(300):  # some of them while all threads look for signals
            with pytest.raises(UsageError, match="another thread sends or receives"):
                comm.close()
            time.sleep(0.002)
        job.all_gather(b"")
        for tag in (2, 0, 3, 1):
            comm.send(np.full(LARGE, tag + 0.5), 1 - rank, tag=tag).wait()
        list(received)
    assert [set(array) for array in arrays] == [{tag + 0.5} for tag in range(4)]


def poll_until_closed(works):
    with contextlib.suppress(CommunicatorClosedError):  # by another thread, or by another rank
        while not all(work.done() for work in works):
            pass


@with_ranks(2, connect)
def test_close_while_other_threads_poll(comm, rank):
    """Threads poll messages that do not end, some of them under way, while another closes the communicator."""
    for _ in range(15):
        group = comm.subgroup(range(2))
        received = [group.receive(np.zeros(1000, np.float32), 1 - rank, tag=tag) for tag in range(50)]
        for tag in range(20):
            group.send(np.ones(100_000, np.float32), 1 - rank, tag=100 + tag)
        with ThreadPoolExecutor(3) as threads:
            polls = threads.map(poll_until_closed, [received] * 3)
            group.close()
            list(polls)
        with pytest.raises(CommunicatorClosedError):
            received[0].wait()
        comm.barrier()
