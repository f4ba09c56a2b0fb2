"""The shared-memory protocol keeps its promises in every order of steps, and the checker finds each mistake."""

import pytest

from instruments.model.checker import check, listed

# What the checker says, with how many ranks, faults, which program, and the mistakes that show so.
FOUND = [
    ("a ring entry is read too early or too late", 2, 0, "inlined", "entry_reused_early posted_before_written"),
    ("a staging buffer is read too early or too late", 2, 0, "staged_gather", "buffer_reused_early"),
    ("a staging buffer is read too early or too late", 2, 0, "staged_scatter", "no_wait_for_copied_out"),
    ("a staging buffer is read too early or too late", 2, 0, "staged", "no_wait_for_copied_in no_wait_for_reduced"),
    ("a staging buffer is read too early or too late", 2, 0, "staged", "copied_in_before_copied"),
    ("what a rank has found is read too early or too late", 2, 0, "direct", "direct_leaves_early"),
    ("wire memory is read too early or too late", 2, 0, "broadcast", "root_leaves_early"),
    ("arguments are posted before they are ready", 2, 0, "reduce_then_gather", "posts_over_output"),
    ("an argument is changed while it is read", 2, 0, "gather_then_reduce", "posts_over_input"),
    ("a ring entry is read too early or too late", 2, 0, "empty", "refusal_read_late"),
    ("a wake-up is lost", 2, 0, "inlined", "wake_before_store no_wake sleeper_not_counted sleeps_without_comparing"),
    ("a wake-up is lost", 3, 0, "gather_then_reduce", "wakes_one"),
    ("no way on to an end", 2, 1, "inlined", "sleeps_without_limit asks_no_lock"),
    ("an error blames a rank that has not left", 2, 0, "inlined", "counter_not_read_again"),
    ("an error blames a rank that was not killed", 2, 1, "inlined", "closed_not_read_again"),
    ("an error blames a rank that was not killed", 3, 1, "gather_then_reduce", "record_given_up record_not_read_again"),
    ("a rank ends too early", 3, 1, "gather_then_reduce", "record_valid_early"),
    ("no way on to an end", 2, 0, "staged", "two_buffers"),
    ("a message has begun to arrive and has no place", 2, 0, "messages", "begun_before_check"),
    ("bytes move after a failure", 2, 0, "messages", "moves_after_failure"),
]
MISTAKES = {mistake: tuple(case) for *case, mistakes in FOUND for mistake in mistakes.split()}


# More of all this: `make model`.
@pytest.mark.slow
@pytest.mark.sweep
def test_two_ranks():
    programs = listed("programs")
    assert programs[-1] == "pairs"
    for program in programs:
        well, printed = check(2, 0 if program == "pairs" else 2, program)
        assert well, printed


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(
    ("program", "faults"), [("gather_then_reduce", 1), ("reduce_then_gather", 1), ("mismatch", 1), ("staged_gather", 1)]
)
def test_three_ranks_with_a_fault(program, faults):
    well, printed = check(3, faults, program)
    assert well, printed


@pytest.mark.slow(kept=10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake):
    wrong, ranks, faults, program = MISTAKES[mistake]
    well, printed = check(ranks, faults, program, mistake)
    assert not well
    assert printed.splitlines()[-1].endswith(": " + wrong), printed


def test_every_mistake_is_tried():
    assert sorted(["none", *MISTAKES]) == sorted(listed("mutations"))
