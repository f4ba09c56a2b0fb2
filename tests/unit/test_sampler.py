"""Shards: disjoint, complete, equal in length, and the same global batches at every world size."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.data.sampler import TAILS, ShardedSampler, data_partition
from distopt.errors import StateError, UsageError
from distopt.shards import block_of

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 9)).filter(lambda pair: pair[0] >= pair[1])


def shards(size, world_size, epoch=0, **options):
    samplers = [ShardedSampler(size, world_size, rank, 1, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [np.concatenate(list(sampler)) for sampler in samplers]


@given(SIZES, st.booleans(), st.integers(0, 2**64), st.integers(0, 3))
def test_drop_uses_every_sample_at_most_once(pair, shuffle, seed, epoch):
    size, world_size = pair
    parts = shards(size, world_size, epoch, seed=seed, shuffle=shuffle)
    assert {len(part) for part in parts} == {size // world_size}
    used = np.concatenate(parts)
    assert len(np.unique(used)) == size - size % world_size
    assert used.min() >= 0
    assert used.max() < size
    if size % world_size == 0:
        np.testing.assert_array_equal(np.sort(used), np.arange(size))


@given(st.integers(1, 50), st.integers(1, 60), st.booleans())
def test_wrap_uses_every_sample_and_repeats_just_enough(size, world_size, shuffle):
    parts = shards(size, world_size, shuffle=shuffle, tail="wrap")
    assert {len(part) for part in parts} == {-(-size // world_size)}
    times = np.bincount(np.concatenate(parts), minlength=size)
    assert len(times) == size
    assert times.min() >= 1
    assert times.sum() - size == -size % world_size
    assert times.max() - times.min() <= 1


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


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        return shards(101, 2, epoch, seed=seed)[1].tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_samples_keep_their_order():
    batches = [list(ShardedSampler(11, 2, rank, 2, shuffle=False)) for rank in (0, 1)]
    np.testing.assert_array_equal(batches, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]])


@pytest.mark.parametrize(("partial", "lengths"), [(False, [4, 4]), (True, [4, 4, 3])])
def test_last_batch_is_equally_long_on_all_ranks(partial, lengths):
    for rank in range(3):
        sampler = ShardedSampler(35, 3, rank, 4, partial_batch=partial)
        for _ in range(2):
            assert [len(batch) for batch in sampler] == lengths
        assert len(sampler) == len(lengths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 2, 0, 64), "a batch of 64 is larger than .* 100 samples over 2 ranks give 50 each; use batch_size 50"),
        ((3, 4, 0, 1), "3 samples over 4 ranks give 0 each; use fewer ranks"),
        ((0, 2, 0, 1), "size is 0; it must be an integer of at least 1"),
        ((-5, 2, 0, 1), "size is -5"),
        ((100, 0, 0, 1), "world_size is 0"),
        ((100, 2, 2, 1), "rank 2 is outside 0 ... 1"),
        ((100, 2, -1, 1), "rank is -1"),
        ((100, 2, 0, 0), "batch_size is 0; it must be an integer of at least 1"),
        ((100, 2, 0, -3), "batch_size is -3"),
        ((100, 2, 0, 8, -1), "seed is -1; it must be an integer of at least 0"),
    ],
)
def test_bad_arguments_give_one_line_with_the_cure(arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        ShardedSampler(*arguments)
    assert "\n" not in str(caught.value)


def test_bad_tail_and_epoch():
    with pytest.raises(UsageError, match="unknown tail 'pad'; choose one of drop, wrap"):
        ShardedSampler(4, 2, 0, 1, tail="pad")
    with pytest.raises(UsageError, match="epoch is -1"):
        ShardedSampler(4, 2, 0, 1).set_epoch(-1)


@given(SIZES)
def test_partitions_are_contiguous_equal_and_views(pair):
    size, world_size = pair
    x = np.arange(size * 2).reshape(size, 2)
    y = np.arange(size)
    parts = [data_partition(x, y, rank, world_size) for rank in range(world_size)]
    count = size // world_size
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), x[: count * world_size])
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), y[: count * world_size])
    assert {len(part[0]) for part in parts} == {count}
    assert np.shares_memory(parts[-1][0], x)


@pytest.mark.parametrize(
    ("samples", "labels", "rank", "world_size", "message"),
    [
        (4, 3, 0, 2, "4 samples have 3 labels"),
        (3, 3, 0, 4, "3 samples cannot be shared by 4 ranks"),
        (4, 4, 2, 2, "rank 2 is outside 0 ... 1"),
        (4, 4, 0, 0, "world_size is 0"),
    ],
)
def test_partition_errors(samples, labels, rank, world_size, message):
    with pytest.raises(UsageError, match=message):
        data_partition(np.zeros((samples, 2)), np.zeros(labels), rank, world_size)


# -- in the middle of an epoch ----------------------------------------------------------------------------------------
@given(SIZES, SIZES, st.integers(1, 5), st.integers(0, 40), st.sampled_from(TAILS), st.booleans())
def test_an_epoch_goes_on_in_its_middle_on_any_number_of_ranks(pair, other, batch_size, steps, tail, partial):
    """Together the ranks of both jobs use the permutation from the front, each place once."""
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
    rest = []
    for rank in range(after):
        sampler = ShardedSampler(size, after, rank, batch_size, **options)
        sampler.set_states(states)
        sampler.set_epoch(2)  # as a loop over epochs does
        mine = list(sampler)
        assert len({len(batch) for batch in mine[:-1]}) <= 1
        rest += [index for batch in mine for index in batch]
    assert sampler.consumed == len(used) + len(rest)
    order = np.random.default_rng((3, 2)).permutation(size)
    together = len(used) + len(rest)
    expected = order[np.arange(together) % size]
    assert sorted(used + rest) == sorted(expected)
    left = size - together
    assert left < after * (1 if partial else batch_size) if tail == "drop" or not partial else left <= 0


@pytest.mark.parametrize(("size", "world_size"), [(3, 6), (1, 5), (3, 7), (3, 5), (4, 4)])
def test_states_at_the_end_of_an_epoch_are_accepted_where_ranks_outnumber_samples(size, world_size):
    for rank in range(world_size):
        sampler = ShardedSampler(size, world_size, rank, 1, tail="wrap")
        assert len(list(sampler)) == -(-size // world_size)
        states = sampler.get_states()
        for other in (world_size, 1, 2 * world_size):
            resumed = ShardedSampler(size, other, 0, 1, tail="wrap")
            resumed.set_states(states)
            assert list(resumed) == []
            assert resumed.get_states() == states
            resumed.set_epoch(1)
            assert len(list(resumed)) == -(-size // other)


def test_another_epoch_or_iteration_begins_at_its_first_sample():
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


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 1}, "seed is 1, that of the states 0"), ({"size": 19}, "size is 19"), ({"shuffle": False}, "shuffle")],
)
def test_states_of_another_order_are_refused(change, message):
    states = ShardedSampler(20, 2, 0, 3).get_states()
    states |= {"epoch": 2, "consumed": 6}
    arguments = {"size": 20, "world_size": 2, "rank": 1, "batch_size": 3, **change}
    sampler = ShardedSampler(**arguments)
    with pytest.raises(StateError, match=message):
        sampler.set_states(states)
    with pytest.raises(StateError, match="not states of a sampler"):
        sampler.set_states({"epoch": 1})
    assert (sampler.epoch, sampler.consumed) == (0, 0)


# -- shards ------------------------------------------------------------------------------------------------------------
def steps_in_shards(world_size: int, first: int = 0, states=None, **options) -> list[list[list[int]]]:
    """For each step, the samples of each shard; `first` is the first step that is taken."""
    samplers = [ShardedSampler(101, world_size, rank, 3, seed=4, shards=8, **options) for rank in range(world_size)]
    for sampler in samplers:
        if states is not None:
            sampler.set_states(states)
    found = []
    for batches in zip(*samplers, strict=True):
        shards = [block_of(8, rank, world_size) for rank in range(world_size)]
        found.append(
            [part.tolist() for own, mine in zip(batches, shards, strict=True) for part in own.reshape(len(mine), -1)]
        )
    return found[first:]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("options", [{}, {"tail": "wrap", "partial_batch": True}, {"shuffle": False}])
def test_shards_have_the_same_samples_on_any_number_of_ranks(world_size, options):
    alone = steps_in_shards(1, **options)
    assert steps_in_shards(world_size, **options) == alone
    samples = [sample for step in alone for shard in step for sample in shard]
    if options.get("tail") == "wrap":
        assert len(alone) == 5
        assert [len(shard) for shard in alone[-1]] == [1] * 8
        assert len(samples) == 13 * 8
        assert set(samples) == set(range(101))
    else:
        assert len(samples) == len(set(samples)) == 4 * 8 * 3


def test_shards_resume_on_another_number_of_ranks():
    sampler = ShardedSampler(101, 3, 1, 3, seed=4, shards=8)
    steps = iter(sampler)
    next(steps), next(steps)
    assert sampler.consumed == 2 * 8 * 3
    assert steps_in_shards(5, states=sampler.get_states()) == steps_in_shards(1, first=2)


def test_shards_are_at_least_as_many_as_ranks_and_fill_a_batch():
    with pytest.raises(UsageError, match="2 shards leave nothing to some of 3 ranks"):
        ShardedSampler(101, 3, 0, 3, shards=2)
    with pytest.raises(
        UsageError, match=r"larger than the share of a shard: 101 samples over 8 shards give 12 each; .*fewer shards"
    ):
        ShardedSampler(101, 3, 0, 13, shards=8)


# -- looks and lengths -------------------------------------------------------------------------------------------------
def test_a_look_after_a_resume_or_in_a_loop_costs_nothing():
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
    assert len(sampler) == whole - 2  # after the loop, for its mean
    assert sampler.epoch_is_over
    sampler.set_epoch(1)
    assert len(sampler) == sampler.batches_per_epoch == whole
    assert not sampler.epoch_is_over


def test_a_sampler_can_be_copied_in_a_loop():
    sampler = ShardedSampler(12, 1, 0, 2)
    for _ in sampler:
        copy = pickle.loads(pickle.dumps(sampler))
        assert (copy.consumed, len(copy)) == (sampler.consumed, 6)
