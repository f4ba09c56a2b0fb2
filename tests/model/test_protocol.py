"""The shared-memory protocol keeps its promises in every order of steps, and the checker finds each mistake."""

import pytest

from tests.model.checker import check, listed

# Which mistake shows in what: ranks, faults, program, what the checker says.
MISTAKES = {
    "entry_reused_early": (2, 0, "inlined", "a ring entry is read too early or too late"),
    "buffer_reused_early": (2, 0, "staged_gather", "a staging buffer is read too early or too late"),
    "no_wait_for_copied_out": (2, 0, "staged_scatter", "a staging buffer is read too early or too late"),
    "no_wait_for_copied_in": (2, 0, "staged", "a staging buffer is read too early or too late"),
    "no_wait_for_reduced": (2, 0, "staged", "a staging buffer is read too early or too late"),
    "direct_leaves_early": (2, 0, "direct", "what a rank has found is read too early or too late"),
    "root_leaves_early": (2, 0, "broadcast", "wire memory is read too early or too late"),
    "posts_over_output": (2, 0, "reduce_then_gather", "arguments are posted before they are ready"),
    "posts_over_input": (2, 0, "gather_then_reduce", "an argument is changed while it is read"),
    "refusal_read_late": (2, 0, "empty", "a ring entry is read too early or too late"),
    "posted_before_written": (2, 0, "inlined", "a ring entry is read too early or too late"),
    "copied_in_before_copied": (2, 0, "staged", "a staging buffer is read too early or too late"),
    "wake_before_store": (2, 0, "inlined", "a wake-up is lost"),
    "no_wake": (2, 0, "inlined", "a wake-up is lost"),
    "wakes_one": (3, 0, "gather_then_reduce", "a wake-up is lost"),
    "sleeper_not_counted": (2, 0, "inlined", "a wake-up is lost"),
    "sleeps_without_comparing": (2, 0, "inlined", "a wake-up is lost"),
    "sleeps_without_limit": (2, 1, "inlined", "no way on to an end"),
    "asks_no_lock": (2, 1, "inlined", "no way on to an end"),
    "counter_not_read_again": (2, 0, "inlined", "an error blames a rank that has not left"),
    "closed_not_read_again": (2, 1, "inlined", "an error blames a rank that was not killed"),
    "record_given_up": (3, 1, "gather_then_reduce", "an error blames a rank that was not killed"),
    "record_not_read_again": (3, 1, "gather_then_reduce", "an error blames a rank that was not killed"),
    "record_valid_early": (3, 1, "gather_then_reduce", "a rank ends too early"),
    "two_buffers": (2, 0, "staged", "no way on to an end"),
    "begun_before_check": (2, 0, "messages", "a message has begun to arrive and has no place"),
    "moves_after_failure": (2, 0, "messages", "bytes move after a failure"),
}


# More of all this: `make model`.
@pytest.mark.slow
@pytest.mark.sweep
def test_two_ranks_with_up_to_two_faults():
    programs = listed("programs")
    assert programs.pop() == "pairs"
    for program in programs:
        well, printed = check(2, 2, program)
        assert well, printed


@pytest.mark.slow
@pytest.mark.sweep
def test_every_operation_after_every_other_one():
    well, printed = check(2, 0, "pairs")
    assert well, printed


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize(
    ("program", "faults"), [("gather_then_reduce", 1), ("reduce_then_gather", 1), ("mismatch", 1), ("staged_gather", 1)]
)
def test_three_ranks_with_a_fault(program, faults):
    well, printed = check(3, faults, program)
    assert well, printed


@pytest.mark.slow(kept=10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake):
    ranks, faults, program, wrong = MISTAKES[mistake]
    well, printed = check(ranks, faults, program, mistake)
    assert not well
    assert printed.splitlines()[-1].endswith(": " + wrong), printed


def test_every_mistake_is_tried():
    assert ["none", *MISTAKES] == listed("mutations")
