"""Shards: disjoint, complete, equal in length, and the same global batches at every world size."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.data.sampler import TAILS, ShardedSampler, data_partition
from distopt.errors import StateError
from distopt.shards import block_of
from tests.unit.refusals import refused

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 9)).filter(lambda pair: pair[0] >= pair[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_global_batches_are_those_of_one_process(world_size):
    size, batch_size = 125, 12
    whole = ShardedSampler(size, 1, 0, batch_size, seed=5)
    ranks = [ShardedSampler(size, world_size, rank, batch_size // world_size, seed=5) for rank in range(world_size)]
    for epoch in (0, 0, 1):
        for sampler in (whole, *ranks):
            sampler.set_epoch(epoch)
        steps = list(zip(*ranks, strict=True))
        assert len(steps) == size // batch_size == len(whole)
        for one, many in zip(whole, steps, strict=True):
            assert sorted(one) == sorted(np.concatenate(many))


def test_order_depends_on_seed_and_epoch_only_and_stays_without_shuffling():
    def order(seed, epoch):
        sampler = ShardedSampler(101, 2, 1, 1, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(np.concatenate([*sampler]))

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, epoch) for seed in (0, 1, 2**64) for epoch in range(3)}) == 9
    batches = [list(ShardedSampler(11, 2, rank, 2, shuffle=False)) for rank in (0, 1)]
    np.testing.assert_array_equal(batches, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]])


@given(SIZES)
def test_partitions_are_contiguous_equal_and_views(pair):
    size, world_size = pair
    x, y = np.arange(size * 2).reshape(size, 2), np.arange(size)
    parts = [data_partition(x, y, rank, world_size) for rank in range(world_size)]
    count = size // world_size
    for whole, shards in zip((x, y), zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(shards), whole[: count * world_size])
        assert {len(shard) for shard in shards} == {count}
    assert np.shares_memory(parts[-1][0], x)


@given(SIZES, SIZES, st.integers(1, 5), st.integers(0, 40), st.sampled_from(TAILS), st.booleans())
def test_an_epoch_goes_on_in_its_middle_on_any_number_of_ranks(pair, other, batch_size, steps, tail, partial):
    """Together the ranks of both jobs use the permutation from the front, each place once, in equally long batches."""
    size, before = pair
    after = min(other[1], size)
    options = {"seed": 3, "tail": tail, "partial_batch": partial}
    batch_size = min(batch_size, size // before, size // after)
    used = []
    for rank in range(before):
        sampler = ShardedSampler(size, before, rank, batch_size, **options)
        sampler.set_epoch(2)
        used += [index for _, batch in zip(range(steps), sampler, strict=False) for index in batch]
    states = sampler.get_states()
    assert states["consumed"] == len(used)
    rest, lengths = [], set()
    for rank in range(after):
        sampler = ShardedSampler(size, after, rank, batch_size, **options)
        sampler.set_states(states)
        sampler.set_epoch(2)  # as a loop over epochs does
        mine = list(sampler)
        lengths.add(tuple(map(len, mine)))
        rest += [index for batch in mine for index in batch]
    assert sampler.consumed == len(used) + len(rest)
    (of_all,) = lengths
    assert set(of_all[:-1]) <= {batch_size}
    assert not of_all or of_all[-1] == batch_size or partial
    order = np.random.default_rng((3, 2)).permutation(size)
    together = len(used) + len(rest)
    expected = order[np.arange(together) % size]
    assert sorted(used + rest) == sorted(expected)
    left = size - together
    assert left < after * (1 if partial else batch_size) if tail == "drop" or not partial else left <= 0


@pytest.mark.parametrize(("size", "world_size"), [(3, 6), (1, 5), (3, 7), (3, 5), (4, 4)])
def test_states_at_the_end_of_an_epoch_are_accepted_where_ranks_outnumber_samples(size, world_size):
    times = np.zeros(size, int)
    for rank in range(world_size):
        sampler = ShardedSampler(size, world_size, rank, 1, tail="wrap")
        (taken,) = sampler
        times[taken] += 1
        states = sampler.get_states()
        for other in (world_size, 1, 2 * world_size):
            resumed = ShardedSampler(size, other, 0, 1, tail="wrap")
            resumed.set_states(states)
            assert list(resumed) == []
            assert resumed.get_states() == states
            resumed.set_epoch(1)
            assert len(list(resumed)) == -(-size // other)
    assert 1 <= times.min() <= times.max() <= times.min() + 1


def test_iterations_begin_at_the_first_sample_and_looks_and_copies_cost_nothing():
    sampler = ShardedSampler(20, 2, 0, 3)
    whole = list(sampler)
    next(iter(sampler))
    assert sampler.consumed == 6
    states = sampler.get_states()
    sampler.set_states(states)
    np.testing.assert_array_equal(list(sampler), whole[1:])
    np.testing.assert_array_equal(list(sampler), whole)
    sampler.set_states(states)
    sampler.set_epoch(1)
    assert sampler.consumed == 0
    assert len(list(sampler)) == len(whole) == 3
    sampler = ShardedSampler(24, 2, 1, 2, seed=1)
    whole = [batch.tolist() for batch in sampler]
    sampler.set_states({**sampler.get_states(), "consumed": 8})
    assert next(iter(sampler)).tolist() == whole[2]
    taken = []
    for batch in sampler:
        taken.append(batch.tolist())
        sampler.finish_step()
        assert next(iter(sampler)).tolist() == whole[0]
        assert sampler.consumed == 8 + 4 * len(taken)
        assert len(sampler) == 4
    assert taken == whole[2:]
    sampler = ShardedSampler(12, 1, 0, 2)
    for _ in sampler:
        copy = pickle.loads(pickle.dumps(sampler))
        assert (copy.consumed, len(copy)) == (sampler.consumed, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 1}, "seed is 1, that of the states 0"), ({"size": 19}, "size is 19"), ({"shuffle": False}, "shuffle")],
)
def test_states_of_another_order_are_refused(change, message):
    states = {**ShardedSampler(20, 2, 0, 3).get_states(), "epoch": 2, "consumed": 6}
    sampler = ShardedSampler(**{"size": 20, "world_size": 2, "rank": 1, "batch_size": 3, **change})
    refused(StateError, message, sampler.set_states, states)
    refused(StateError, "not states of a sampler", sampler.set_states, {"epoch": 1})
    assert (sampler.epoch, sampler.consumed) == (0, 0)


def steps_in_shards(world_size: int, first: int = 0, states=None, **options) -> list[list[list[int]]]:
    """For each step, the samples of each shard; `first` is the first step that is taken."""
    samplers = [ShardedSampler(101, world_size, rank, 3, seed=4, shards=8, **options) for rank in range(world_size)]
    for sampler in samplers:
        if states is not None:
            sampler.set_states(states)
    shards = [len(block_of(8, rank, world_size)) for rank in range(world_size)]
    steps = [zip(batches, shards, strict=True) for batches in zip(*samplers, strict=True)]
    return [[part.tolist() for own, mine in step for part in own.reshape(mine, -1)] for step in steps][first:]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("options", [{}, {"tail": "wrap", "partial_batch": True}, {"shuffle": False}])
def test_shards_have_the_same_samples_on_any_number_of_ranks(world_size, options):
    alone = steps_in_shards(1, **options)
    assert steps_in_shards(world_size, **options) == alone
    samples = [sample for step in alone for shard in step for sample in shard]
    if options.get("tail") == "wrap":
        assert (len(alone), len(samples)) == (5, 13 * 8)
        assert [len(shard) for shard in alone[-1]] == [1] * 8
        assert set(samples) == set(range(101))
    else:
        assert len(samples) == len(set(samples)) == 4 * 8 * 3


def test_shards_resume_on_another_number_of_ranks():
    sampler = ShardedSampler(101, 3, 1, 3, seed=4, shards=8)
    steps = iter(sampler)
    next(steps), next(steps)
    assert sampler.consumed == 2 * 8 * 3
    assert steps_in_shards(5, states=sampler.get_states()) == steps_in_shards(1, first=2)


@pytest.mark.parametrize("options", [{}, {"shards": 4}, {"partial_batch": True}, {"tail": "wrap"}])
def test_a_length_is_that_of_the_iteration(options):
    sampler = ShardedSampler(50, 2, 0, 3, **options)
    whole = sampler.batches_per_epoch
    assert len(sampler) == whole == len(list(sampler))
    batches = iter(sampler)
    next(batches), next(batches)
    assert len(sampler) == whole
    sampler.set_states(sampler.get_states())
    assert len(sampler) == whole - 2 == len(list(sampler))
    assert (len(sampler), sampler.epoch_is_over) == (whole - 2, True)  # after the loop, for its mean
    sampler.set_epoch(1)
    assert (len(sampler), sampler.batches_per_epoch, sampler.epoch_is_over) == (whole, whole, False)
