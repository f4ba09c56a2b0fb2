"""Decisions of the owner of `distopt run`'s endpoint on agents' messages."""

import re
import selectors
import signal
import time
from dataclasses import asdict, replace

import pytest

from distopt.launch.agents.node import NO_RANK, Node
from distopt.launch.agents.options import RunOptions
from distopt.launch.agents.owner import Owner
from distopt.launch.gate import FOR_AGENT
from distopt.launch.supervise.ranks import Failure

SIGKILL = Failure(2, 137, "rank 2 was ended by SIGKILL")
RAISED = Failure(1, 1, "rank 1 left with exit code 1: ValueError")
LEFT = Failure(0, 3, "rank 0 left with exit code 3")
PEER_LOST = Failure(3, 1, "rank 3 left with exit code 1: PeerLostError", is_consequence=True)
ENDED = Failure(1, 143, "rank 1 was ended by SIGTERM", is_consequence=True)
GONE = Failure(3, 1, "node 1 has ended", is_final=True)


class OneNode:
    """An owner whose only node is a list of sent messages."""

    def __init__(self, restarts=0, *, heal=False, spare=0):
        self.told = []
        self.node = Node("host", 7, NO_RANK, self.told.append, "127.0.0.1")
        options = RunOptions(("python",), ranks=4, restarts=restarts, heal=heal)
        self.owner = Owner(self.node, options, bytes(32), selectors.DefaultSelector(), self.told.append)
        self.say("hello", ranks=4, spare=spare, attempt=-1)

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


def test_the_time_of_a_healing_after_a_long_time_without_one(monkeypatch):
    now = time.monotonic()
    job = OneNode(heal=True)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(20):
        now += 0.25
        job.owner.check_times()
    job.say("failed", [SIGKILL])
    now += 0.25
    job.say("ended", [SIGKILL], steps=[3] * 4)
    now += 0.25
    assert job.say("stepped", step=4).endswith(
        "healed: step 4 was done after 0.50 s (step 3 had been reached, training goes on from step 3: 0 steps lost)"
    )


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


def started_ranks(job: OneNode) -> int:
    assert job.told[-1]["do"] == "start"
    assert job.told[-1]["size"] == job.told[-1]["ranks"]
    return job.told[-1]["ranks"]


@pytest.mark.parametrize(
    "failure", [replace(SIGKILL, rank=1), Failure(1, 2, "rank 1 cannot be started", is_final=True)]
)
def test_a_node_that_can_do_without_ranks_goes_on_with_fewer_until_there_are_new_steps(failure):
    job = OneNode(heal=True, spare=2)
    counts = [started_ranks(job)]
    for _ in range(5):
        job.say("ended", [failure], steps=[8] * 4)
        if job.told[-1]["do"] == "finish":
            break
        counts.append(started_ranks(job))
    again = 0 if failure.is_final else 1  # one that was killed may live the next time
    assert counts[: 4 + 2 * again] == ([4, 3, 2] if failure.is_final else [4, 4, 3, 3, 2, 2])
    if failure.is_final:
        assert job.told[-1] == {"do": "finish", "code": 2, "text": failure.text}


def test_ranks_that_were_left_out_start_again_at_the_next_healing_after_a_step():
    job = OneNode(heal=True, spare=3)
    for count in (4, 3):
        job.say("ended", [SIGKILL], steps=[8] * 4)
        assert started_ranks(job) == count
    line = job.say("stepped", step=9)
    assert line.startswith(f"{SIGKILL.text}; continuing with 3 of 4 ranks on host (pid 7); healed: step 9 was done")
    job.say("ended", [replace(SIGKILL, rank=1)], steps=[9] * 4)
    assert started_ranks(job) == 4


class Connection:
    rank, address, purpose = NO_RANK, "10.0.0.1", FOR_AGENT

    def __init__(self, host, pid):
        self.host, self.pid = host, pid


class Nodes:
    """An owner of a job of 1 to 3 nodes with 2 ranks each; the others have connections that do not exist."""

    def __init__(self, least=1):
        self.lines, self.told = [], {}
        options = RunOptions(("python",), ranks=2, nodes=3, spare_nodes=3 - least, heal=True, timeout=1e9)
        own = Node("h0", 100, NO_RANK, self.told.setdefault("h0", []).append, "127.0.0.1")
        self.owner = Owner(own, options, bytes(32), selectors.DefaultSelector(), self.lines.append)
        self.nodes = {"h0": own}
        self.say("h0", "hello", ranks=2, spare=0, attempt=-1)

    def say(self, host, say, failures=(), **content):
        failures = [asdict(failure) for failure in failures]
        said = {"say": say, "port": 1, "steps": [0, 0], "failures": failures, "signals": [], **content}
        self.owner.hear(self.nodes[host], said)

    def come(self, host, steps=(0, 0), attempt=-1, **content):
        link = Connection(host, len(self.told))
        assert self.owner._refusal(link, 3) == ""
        self.owner._admitted(link)
        self.nodes[host] = self.owner._by_link[link]
        self.nodes[host].send = self.told.setdefault(host, []).append
        self.say(host, "hello", ranks=2, spare=0, attempt=attempt, steps=list(steps), **content)

    def go(self, host):
        self.owner._lost(next(link for link, node in self.owner._by_link.items() if node is self.nodes[host]))

    def wait(self):
        """The last call passes."""
        self.owner._came_at = -1e9
        self.owner.check_times()

    def last(self, host):
        return self.told[host][-1]

    def orders(self):
        """For each node of the last attempt: its number, its first rank, and the numbers of nodes and ranks."""
        last = {host: told[-1] for host, told in self.told.items() if told and told[-1]["do"] == "start"}
        newest = max(order["attempt"] for order in last.values())
        return {
            host: (order["node"], order["first"], order["nodes"], order["size"])
            for host, order in last.items()
            if order["attempt"] == newest
        }


def test_a_job_starts_with_the_nodes_that_have_come_and_all_at_once_if_it_is_all_of_them():
    job = Nodes(least=2)
    job.wait()
    assert not job.told["h0"]
    job.come("h2")
    assert not job.told["h0"]
    job.wait()
    assert job.orders() == {"h0": (0, 0, 2, 4), "h2": (1, 2, 2, 4)}
    job = Nodes(least=1)
    job.come("h2")
    job.come("h1")
    assert job.orders() == {"h0": (0, 0, 3, 6), "h1": (1, 2, 3, 6), "h2": (2, 4, 3, 6)}


def test_nodes_are_lost_and_come_again():
    job = Nodes()
    job.come("h1")
    job.come("h2")
    job.say("h0", "stepped", step=1)
    job.go("h1")
    assert re.search(
        r"node 1 \(ranks 2 to 3\), h1 .* cannot be reached; .*; continuing with 2 of 3 nodes$", job.lines[-1]
    )
    assert job.last("h0") == job.last("h2") == {"do": "end", "patience": 0.0, "gives": True}
    job.say("h2", "ended", [PEER_LOST], steps=[7, 7])
    job.say("h0", "ended", steps=[7, 7])
    assert job.orders() == {"h0": (0, 0, 2, 4), "h2": (1, 2, 2, 4)}
    job.come("h1")
    assert job.lines[-1].endswith("has come, and takes part after the next step that a Checkpoint counts")
    assert job.orders() == {"h0": (0, 0, 2, 4), "h2": (1, 2, 2, 4)}
    job.say("h0", "stepped", step=8)
    assert job.last("h0") == job.last("h2") == {"do": "end", "patience": 0.0, "gives": True}
    job.say("h0", "ended", [Failure(0, 137, "", is_consequence=True)], steps=[8, 8])
    job.say("h2", "ended", [Failure(2, 137, "", is_consequence=True)], steps=[8, 8])
    assert job.orders() == {"h0": (0, 0, 3, 6), "h1": (1, 2, 3, 6), "h2": (2, 4, 3, 6)}
    job.say("h0", "stepped", step=9)
    assert re.match(r"h1 \(pid \d\) has come; healed: step 9 was done after", job.lines[-1])


def test_the_job_goes_on_until_a_node_that_comes_has_imported_what_ranks_import():
    job = Nodes()
    job.wait()
    job.owner.modules = lambda: ("torch",)
    job.say("h0", "stepped", step=1)
    job.come("h1", ready=False)
    assert job.last("h1") == {"do": "prepare", "modules": ["torch"]}
    job.say("h0", "stepped", step=2)
    assert job.last("h0")["do"] == "start"
    job.say("h1", "ready")
    assert job.last("h0")["do"] == "end"
    job.say("h0", "ended", [Failure(0, 137, "", is_consequence=True)], steps=[2, 2])
    assert job.orders() == {"h0": (0, 0, 2, 4), "h1": (1, 2, 2, 4)}


def test_fewer_nodes_than_the_least_wait():
    job = Nodes(least=2)
    job.come("h1")
    job.wait()
    job.go("h1")
    job.say("h0", "ended", [PEER_LOST])
    assert job.lines[-1].endswith("waiting for it, or for the same line typed on another in its place")
    assert job.last("h0")["do"] == "end"
    job.come("h3")
    assert job.orders() == {"h0": (0, 0, 2, 4), "h3": (1, 2, 2, 4)}


def test_a_node_that_comes_and_goes_before_it_takes_part_changes_nothing():
    job = Nodes()
    job.wait()
    job.come("h1")
    job.go("h1")
    job.say("h0", "stepped", step=1)
    assert job.orders() == {"h0": (0, 0, 1, 2)}
    job.say("h0", "ended")
    assert job.last("h0") == {"do": "finish", "code": 0, "text": ""}


def test_a_job_that_ends_while_a_node_comes_has_not_failed():
    job = Nodes()
    job.wait()
    job.say("h0", "stepped", step=1)
    job.come("h1")
    assert job.last("h0")["do"] == "end"
    job.say("h0", "ended")
    assert job.last("h0") == job.last("h1") == {"do": "finish", "code": 0, "text": ""}


def test_a_failure_while_a_node_comes_is_told():
    job = Nodes()
    job.wait()
    job.say("h0", "stepped", step=1)
    job.come("h1")
    job.say("h0", "ended", [RAISED], steps=[1, 1])
    assert job.orders() == {"h0": (0, 0, 2, 4), "h1": (1, 2, 2, 4)}
    job.say("h0", "stepped", step=2)
    assert re.match(rf"h1 \(pid \d\) has come; {re.escape(RAISED.text)}; healed: ", job.lines[-1])


def test_another_owner_goes_on_counting_attempts():
    job = Nodes()
    job.come("h1", steps=(4, 4), attempt=6)
    job.wait()
    assert job.last("h0")["attempt"] == job.last("h1")["attempt"] == 7
    job.say("h0", "stepped", step=5)
    job.come("h2", steps=(3, 3), attempt=9)  # it has been part of attempts that this owner does not know
    for host, rank in (("h0", 0), ("h1", 2)):
        job.say(host, "ended", [Failure(rank, 137, "", is_consequence=True)], steps=[5, 5])
    assert {job.last(host)["attempt"] for host in ("h0", "h1", "h2")} == {10}


def test_a_job_has_no_more_nodes_than_its_most():
    job = Nodes()
    job.come("h1")
    job.come("h2")
    link = Connection("h3", 9)
    assert "has its 3 nodes already" in job.owner._refusal(link, 3)
    job = Nodes()
    job.wait()
    assert job.owner._refusal(link, 4) == "h3 (pid 9) was started with --nnodes 4, h0 (pid 100) with --nnodes 3"


def test_a_signal_ends_the_job_of_all_nodes_and_says_how_to_take_out_one():
    job = Nodes()
    job.come("h1")
    job.wait()
    ended = [Failure(2, 130, "rank 2 was ended by SIGINT")]
    job.say("h1", "ended", ended, signals=[signal.SIGINT])
    job.say("h0", "ended", [Failure(0, 137, "", is_consequence=True)])
    text = "SIGINT: all 4 ranks have ended; to take out one node, end its distopt run by SIGKILL"
    assert job.last("h0") == job.last("h1") == {"do": "finish", "code": 130, "text": text}
