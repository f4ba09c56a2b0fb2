"""Decisions of the owner of `distopt run`'s endpoint on agents' messages."""

import selectors
import signal
from dataclasses import asdict, replace

import pytest

from distopt.launch.nodes.options import RunOptions
from distopt.launch.nodes.owner import NO_RANK, Node, Owner
from distopt.launch.supervise.ranks import Failure

SIGKILL = Failure(2, 137, "rank 2 was ended by SIGKILL")
RAISED = Failure(1, 1, "rank 1 left with exit code 1: ValueError")
LEFT = Failure(0, 3, "rank 0 left with exit code 3")
PEER_LOST = Failure(3, 1, "rank 3 left with exit code 1: PeerLostError", is_consequence=True)
ENDED = Failure(1, 143, "rank 1 was ended by SIGTERM", is_consequence=True)
GONE = Failure(3, 1, "node 1 has ended", is_final=True)


class OneNode:
    """An owner whose only node is a list of sent messages."""

    def __init__(self, restarts=0, *, heal=False):
        self.told = []
        self.node = Node("host", 7, NO_RANK, self.told.append, "127.0.0.1")
        options = RunOptions(("python",), ranks=4, restarts=restarts, heal=heal)
        self.owner = Owner(self.node, options, bytes(32), selectors.DefaultSelector(), self.told.append)
        self.say("hello", ranks=4)

    def say(self, say, failures=(), signals=(), **content):
        failures = [asdict(failure) for failure in failures]
        said = {"say": say, "port": 1, "steps": [0] * 4, "failures": failures, "signals": list(signals), **content}
        self.owner.hear(self.node, said)
        return self.told[-1]


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([RAISED], RAISED),
        ([LEFT, RAISED], LEFT),
        ([RAISED, LEFT], RAISED),
        ([PEER_LOST, RAISED], RAISED),
        ([PEER_LOST, ENDED, LEFT], LEFT),
        ([RAISED, SIGKILL], RAISED),
        ([SIGKILL, RAISED], SIGKILL),
        ([SIGKILL, GONE, RAISED], GONE),
        ([PEER_LOST], PEER_LOST),
    ],
)
def test_the_cause_is_told_and_not_what_followed(failures, first):
    job = OneNode()
    for i in range(len(failures)):
        job.say("failed", failures[: i + 1])
    assert job.say("ended", failures) == {"do": "finish", "code": first.code, "text": first.text}


def test_no_failure():
    assert OneNode().say("ended") == {"do": "finish", "code": 0, "text": ""}


@pytest.mark.parametrize(
    ("failure", "signals", "patience"),
    [
        (RAISED, [], 1.0),
        (RAISED, [signal.SIGUSR1], 1.0),
        (RAISED, [signal.SIGTERM], 30.0),
        (Failure(0, 138, "rank 0 left with exit code 138"), [signal.SIGUSR1], 30.0),
        (GONE, [signal.SIGTERM], 0.0),
    ],
)
def test_ranks_that_may_be_saving_get_time(failure, signals, patience):
    job = OneNode()
    assert job.say("failed", [failure], signals) == {"do": "end", "patience": patience}
    n_told = len(job.told)
    job.say("failed", [failure, PEER_LOST], signals)
    assert len(job.told) == n_told  # ended once
    assert job.say("kill", signals=signals) == {"do": "end", "patience": 0.0}


@pytest.mark.parametrize(
    ("failures", "signals", "code", "text"),
    [
        ([ENDED], [signal.SIGTERM], 143, "SIGTERM: all 4 ranks have ended"),
        (
            [Failure(0, 137, "", is_consequence=True)],
            [signal.SIGINT, signal.SIGINT],
            130,
            "SIGINT: all 4 ranks have ended",
        ),
        ([LEFT], [signal.SIGTERM], 3, LEFT.text),
        ([GONE], [], 1, GONE.text),
        ([RAISED], [signal.SIGUSR1], None, f"{RAISED.text}; starting all ranks again (1 of 2)"),
    ],
)
def test_a_job_that_a_signal_has_ended_is_not_started_again(failures, signals, code, text):
    job = OneNode(restarts=2)
    told = job.say("ended", failures, signals)
    assert (told.get("code"), told["text"], told["do"]) == (code, text, "start" if code is None else "finish")


def test_restarts_are_counted():
    job = OneNode(restarts=2)
    first = job.told[-1]["attempt"]
    assert [first, *(job.say("ended", [RAISED])["attempt"] for _ in range(2))] == [0, 1, 2]
    assert job.say("ended", [RAISED])["do"] == "finish"


def test_a_job_is_healed_as_long_as_there_are_new_steps():
    job = OneNode(heal=True)
    for step in range(12):
        assert job.say("failed", [SIGKILL])["patience"] == 0.0
        assert job.say("ended", [SIGKILL], steps=[step] * 4)["do"] == "start"
        assert job.told[-1]["attempt"] == step + 1
        line = job.say("stepped", step=step + 1)
        assert line.startswith(f"{SIGKILL.text}; healed: step {step + 1} was done after 0.")
        before = len(job.told)
        job.say("stepped", step=step + 1)
        assert len(job.told) == before  # one line a healing


def test_five_attempts_without_a_new_step_are_the_last():
    job = OneNode(heal=True)
    for attempt in range(5):
        text = f"{SIGKILL.text}; no step was done since" if attempt else ""
        assert (job.say("ended", [SIGKILL], steps=[8] * 4)["do"], job.told[-1]["text"]) == ("start", text)
    assert job.say("ended", [SIGKILL], steps=[8] * 4)["do"] == "finish"
    assert job.told[-1]["code"] == SIGKILL.code


def test_the_same_failure_after_the_same_step_is_the_last():
    job = OneNode(heal=True)
    again = replace(LEFT, text=LEFT.text.replace("left", "(pid 8) left"))
    assert job.say("ended", [LEFT], steps=[8] * 4)["do"] == "start"
    assert job.say("ended", [RAISED], steps=[8] * 4)["do"] == "start"
    assert job.say("ended", [again], steps=[8] * 4) == {
        "do": "finish",
        "code": LEFT.code,
        "text": f"{again.text}; so it did before, after step 8",
    }


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_job_that_heals(signum):
    job = OneNode(heal=True)
    ended = Failure(1, 128 + signum, "rank 1 was ended")
    assert job.say("ended", [ended], [signum], steps=[8] * 4)["code"] == 128 + signum
