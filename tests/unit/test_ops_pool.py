"""The pool of arrays: nothing aliases a live array, and a second round allocates nothing."""

import threading

import numpy as np
import pytest

from distopt.nn.numerics.memory import Pool

LARGE = 50_000


@pytest.mark.parametrize("shape", [LARGE, (100, 501), (2, 3, 5, 1001), (), 0, (0, 7), 3])
@pytest.mark.parametrize("dtype", [np.float32, "float64", np.uint8])
def test_arrays_are_ordinary(shape, dtype):
    a = Pool().empty(shape, dtype)
    assert a.shape == np.empty(shape).shape
    assert a.dtype == dtype
    assert a.flags.c_contiguous
    assert a.flags.writeable
    if a.nbytes >= 4096:
        assert a.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "keep",
    [
        lambda a: a[10:20],
        lambda a: a.reshape(5, -1).T[1:3],
        lambda a: a.view(np.int32),
        lambda a: memoryview(a),
        lambda a: a.__array_interface__ and np.asarray(a)[:1],
        lambda a: [{"deep": a}],
        lambda a: np.lib.stride_tricks.as_strided(a, (3,), (4,)),
    ],
)
def test_whatever_refers_to_an_array_keeps_its_memory(keep):
    pool = Pool()
    a = pool.empty(LARGE)
    address = a.ctypes.data
    kept = keep(a)
    del a
    b = pool.empty(LARGE)
    assert b.ctypes.data != address
    del kept
    c = pool.empty(LARGE)
    assert c.ctypes.data == address


def held_bytes(pool):
    """Size of all blocks, idle or not."""
    return sum(size * len(blocks) for size, blocks in pool._blocks.items())


def test_second_step_allocates_nothing():
    pool = Pool()

    def step():
        held = [pool.empty(LARGE + 100 * i) for i in range(10)]
        held.append(pool.empty((7, LARGE), np.float64))
        return {a.ctypes.data for a in held}

    first = step()
    held = held_bytes(pool)
    for _ in range(5):
        assert step() == first
    assert held_bytes(pool) == held


def test_blocks_out_of_use_are_given_back_some_day():
    pool = Pool()
    pool.empty(10 * LARGE)
    for _ in range(5000):
        pool.empty(LARGE)
    kept = pool.empty(2 * LARGE)  # only a call that allocates looks for stale blocks
    assert held_bytes(pool) < 5 * LARGE * 4
    kept.fill(0)


def test_threads_do_not_share_live_arrays():
    pool, errors = Pool(), []

    def work(number):
        for i in range(300):
            a = pool.empty(LARGE // 10 + i % 3)
            a.fill(number)
            b = pool.empty(LARGE // 10)
            b.fill(-number)
            if not ((a == number).all() and (b == -number).all()):
                errors.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
