"""The pool of arrays: nothing aliases a live array, and a second round allocates nothing."""

from functools import partial

import numpy as np
import pytest

from distopt.nn.numerics.memory import Pool
from tests.unit.threads import in_threads

LARGE = 50_000


@pytest.mark.parametrize("shape", [LARGE, (100, 501), (2, 3, 5, 1001), (), 0, (0, 7), 3])
@pytest.mark.parametrize("dtype", [np.float32, "float64", np.uint8])
def test_arrays_are_ordinary(shape, dtype):
    a = Pool().empty(shape, dtype)
    assert (a.shape, a.dtype) == (np.empty(shape).shape, dtype)
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
    another = pool.empty(LARGE)
    assert another.ctypes.data != address
    del kept
    assert pool.empty(LARGE).ctypes.data == address


def held_bytes(pool):
    return sum(size * len(blocks) for size, blocks in pool._blocks.items())


def test_a_second_step_allocates_nothing_and_blocks_out_of_use_are_given_back():
    pool = Pool()

    def step():
        held = [pool.empty(LARGE + 100 * i) for i in range(10)]
        held.append(pool.empty((7, LARGE), np.float64))
        return {a.ctypes.data for a in held}

    before = step(), held_bytes(pool)
    for _ in range(5):
        assert (step(), held_bytes(pool)) == before
    pool = Pool()
    pool.empty(10 * LARGE)
    for _ in range(5000):
        pool.empty(LARGE)
    kept = pool.empty(2 * LARGE)  # only a call that allocates looks for stale blocks
    assert held_bytes(pool) < 5 * LARGE * 4
    kept.fill(0)


def test_threads_do_not_share_live_arrays():
    pool = Pool()

    def work(number):
        for i in range(300):
            a = pool.empty(LARGE // 10 + i % 3)
            a.fill(number)
            b = pool.empty(LARGE // 10)
            b.fill(-number)
            assert (a == number).all(), (number, i)
            assert (b == -number).all(), (number, i)

    in_threads(*(partial(work, number) for number in range(1, 5)))
