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
KILLED = Failure(0, 137, "", is_consequence=True)
GONE = Failure(3, 1, "node 1 has ended", is_final=True)
CAUSES = [([RAISED], RAISED), ([LEFT, RAISED], LEFT), ([RAISED, LEFT], RAISED), ([PEER_LOST, RAISED], RAISED)]
CAUSES += [([PEER_LOST, ENDED, LEFT], LEFT), ([RAISED, SIGKILL], RAISED), ([SIGKILL, RAISED], SIGKILL)]
CAUSES += [([SIGKILL, GONE, RAISED], GONE), ([PEER_LOST], PEER_LOST)]
TWO = {"h0": (0, 0, 2, 4), "h1": (1, 2, 2, 4)}
THREE = {"h0": (0, 0, 3, 6), "h1": (1, 2, 3, 6), "h2": (2, 4, 3, 6)}


def message(say, n_ranks, failures, **content):
    fields = {"say": say, "port": 1, "steps": [0] * n_ranks, "failures": list(map(asdict, failures)), "signals": []}
    return {**fields, **content}


class OneNode:
    """An owner whose only node is a list of sent messages."""

    def __init__(self, restarts=0, *, heal=False, spare=0):
        self.told = []
        self.node = Node("host", 7, NO_RANK, self.told.append, "127.0.0.1")
        options = RunOptions(("python",), ranks=4, restarts=restarts, heal=heal)
        self.owner = Owner(self.node, options, bytes(32), selectors.DefaultSelector(), self.told.append)
        self.say("hello", ranks=4, spare=spare, attempt=-1)

    def say(self, say, failures=(), signals=(), **content):
        self.owner.hear(self.node, message(say, 4, failures, signals=list(signals), **content))
        return self.told[-1]

    def end(self, failure, step):
        """Its ranks have ended after `step`: what becomes of the job, the text, and the code."""
        told = self.say("ended", [failure], steps=[step] * 4)
        return told["do"], told["text"], told.get("code")


@pytest.mark.parametrize(("failures", "first"), CAUSES)
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
        ([KILLED], [signal.SIGINT] * 2, 130, "SIGINT: all 4 ranks have ended"),
        ([LEFT], [signal.SIGTERM], 3, LEFT.text),
        ([GONE], [], 1, GONE.text),
        ([RAISED], [signal.SIGUSR1], None, f"{RAISED.text}; starting all ranks again (1 of 2)"),
    ],
)
def test_a_job_that_a_signal_has_ended_is_not_started_again(failures, signals, code, text):
    job = OneNode(restarts=2)
    told = job.say("ended", failures, signals)
    assert (told.get("code"), told["text"], told["do"]) == (code, text, "start" if code is None else "finish")


def test_restarts_are_counted_and_healed_as_long_as_there_are_new_steps():
    job = OneNode(restarts=2)
    first = job.told[-1]["attempt"]
    assert [first, *(job.say("ended", [RAISED])["attempt"] for _ in range(2))] == [0, 1, 2]
    assert job.say("ended", [RAISED])["do"] == "finish"
    job = OneNode(heal=True)
    for step in range(12):
        assert job.say("failed", [SIGKILL])["patience"] == 0.0
        assert job.end(SIGKILL, step)[0] == "start"
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
    job.end(SIGKILL, 3)
    now += 0.25
    steps = r"\(step 3 had been reached, training goes on from step 3: 0 steps lost\)"
    assert re.search(rf"healed: step 4 was done after 0\.50 s {steps}$", job.say("stepped", step=4))


def test_how_long_a_job_is_healed():
    job = OneNode(heal=True)
    for attempt in range(5):
        text = f"{SIGKILL.text}; no step was done since" if attempt else ""
        assert job.end(SIGKILL, 8) == ("start", text, None)
    assert job.end(SIGKILL, 8)[::2] == ("finish", SIGKILL.code)
    job = OneNode(heal=True)
    again = replace(LEFT, text=LEFT.text.replace("left", "(pid 8) left"))
    assert [job.end(failure, 8)[0] for failure in (LEFT, RAISED)] == ["start"] * 2
    assert job.end(again, 8) == ("finish", f"{again.text}; so it did before, after step 8", LEFT.code)


def started_ranks(job: OneNode) -> int:
    assert (job.told[-1]["do"], job.told[-1]["size"]) == ("start", job.told[-1]["ranks"])
    return job.told[-1]["ranks"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [  # one that was killed may live the next time
        (replace(SIGKILL, rank=1), [4, 4, 3, 3, 2, 2]),
        (Failure(1, 2, "rank 1 cannot be started", is_final=True), [4, 3, 2]),
    ],
)
def test_a_node_that_can_do_without_ranks_goes_on_with_fewer_until_there_are_new_steps(failure, expected):
    job = OneNode(heal=True, spare=2)
    counts = [started_ranks(job)]
    while len(counts) < 6 and job.end(failure, 8)[0] != "finish":
        counts.append(started_ranks(job))
    assert counts == expected
    assert not failure.is_final or job.told[-1] == {"do": "finish", "code": 2, "text": failure.text}


def test_ranks_that_were_left_out_start_again_at_the_next_healing_after_a_step():
    job = OneNode(heal=True, spare=3)
    for count in (4, 3):
        job.end(SIGKILL, 8)
        assert started_ranks(job) == count
    line = job.say("stepped", step=9)
    assert line.startswith(f"{SIGKILL.text}; continuing with 3 of 4 ranks on host (pid 7); healed: step 9 was done")
    job.end(replace(SIGKILL, rank=1), 9)
    assert started_ranks(job) == 4


class Connection:
    rank, address, purpose = NO_RANK, "10.0.0.1", FOR_AGENT

    def __init__(self, host, pid):
        self.host, self.pid = host, pid


class Nodes:
    """An owner of a job of 1 to 3 nodes with 2 ranks each; the others have connections that do not exist."""

    def __init__(self, *come, least=1):
        self.lines, self.told = [], {}
        options = RunOptions(("python",), ranks=2, nodes=3, spare_nodes=3 - least, heal=True, timeout=1e9)
        own = Node("h0", 100, NO_RANK, self.told.setdefault("h0", []).append, "127.0.0.1")
        self.owner = Owner(own, options, bytes(32), selectors.DefaultSelector(), self.lines.append)
        self.nodes = {"h0": own}
        self.say("h0", "hello", ranks=2, spare=0, attempt=-1)
        for host in come:
            self.come(host)

    def say(self, host, say, failures=(), **content):
        self.owner.hear(self.nodes[host], message(say, 2, failures, **content))

    def end(self, step, failure=KILLED, **ranks):
        """Nodes, each with its first rank, have ended their ranks after `step`."""
        for host, rank in ranks.items():
            self.say(host, "ended", [replace(failure, rank=rank)], steps=[step, step])

    def coming(self):
        """After step 1, node h1 comes, for which ranks have to end."""
        self.wait().say("h0", "stepped", step=1)
        self.come("h1")
        assert self.last("h0")["do"] == "end"
        return self

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
        return self

    def last(self, host):
        return self.told[host][-1]

    def orders(self):
        """For each node of the last attempt: its number, its first rank, and the numbers of nodes and ranks."""
        last = {host: told[-1] for host, told in self.told.items() if told and told[-1]["do"] == "start"}
        newest = max(order["attempt"] for order in last.values())
        numbers = "node", "first", "nodes", "size"
        return {host: tuple(map(order.get, numbers)) for host, order in last.items() if order["attempt"] == newest}


def test_a_job_starts_with_the_nodes_that_have_come_and_waits_for_the_least():
    job = Nodes(least=2).wait()
    assert not job.told["h0"]
    job.come("h2")
    assert not job.told["h0"]
    assert job.wait().orders() == {"h0": (0, 0, 2, 4), "h2": (1, 2, 2, 4)}
    assert Nodes("h2", "h1").orders() == THREE
    job = Nodes("h1", least=2).wait()
    job.go("h1")
    job.say("h0", "ended", [PEER_LOST])
    assert job.lines[-1].endswith("waiting for it, or for the same line typed on another in its place")
    assert job.last("h0")["do"] == "end"
    job.come("h3")
    assert job.orders() == {"h0": (0, 0, 2, 4), "h3": (1, 2, 2, 4)}


def test_nodes_are_lost_and_come_again():
    job, ends = Nodes("h1", "h2"), {"do": "end", "patience": 0.0, "gives": True}
    job.say("h0", "stepped", step=1)
    job.go("h1")
    lost = r"node 1 \(ranks 2 to 3\), h1 .* cannot be reached; .*; continuing with 2 of 3 nodes$"
    assert re.search(lost, job.lines[-1])
    assert job.last("h0") == job.last("h2") == ends
    job.say("h2", "ended", [PEER_LOST], steps=[7, 7])
    job.say("h0", "ended", steps=[7, 7])
    without = {"h0": (0, 0, 2, 4), "h2": (1, 2, 2, 4)}
    assert job.orders() == without
    job.come("h1")
    assert job.lines[-1].endswith("has come, and takes part after the next step that a Checkpoint counts")
    assert job.orders() == without
    job.say("h0", "stepped", step=8)
    assert job.last("h0") == job.last("h2") == ends
    job.end(8, h0=0, h2=2)
    assert job.orders() == THREE
    job.say("h0", "stepped", step=9)
    assert re.match(r"h1 \(pid \d\) has come; healed: step 9 was done after", job.lines[-1])


def test_the_job_goes_on_until_a_node_that_comes_has_imported_what_ranks_import():
    job = Nodes().wait()
    job.owner.modules = lambda: ("torch",)
    job.say("h0", "stepped", step=1)
    job.come("h1", ready=False)
    assert job.last("h1") == {"do": "prepare", "modules": ["torch"]}
    job.say("h0", "stepped", step=2)
    assert job.last("h0")["do"] == "start"
    job.say("h1", "ready")
    assert job.last("h0")["do"] == "end"
    job.end(2, h0=0)
    assert job.orders() == TWO


def test_nodes_that_leave_jobs_that_end_and_failures_before_a_node_takes_part():
    job = Nodes().wait()
    job.come("h1")
    job.go("h1")
    job.say("h0", "stepped", step=1)
    assert job.orders() == {"h0": (0, 0, 1, 2)}
    job.say("h0", "ended")
    assert job.last("h0") == {"do": "finish", "code": 0, "text": ""}
    job = Nodes().coming()
    job.say("h0", "ended")
    assert job.last("h0") == job.last("h1") == {"do": "finish", "code": 0, "text": ""}
    job = Nodes().coming()
    job.end(1, RAISED, h0=1)
    assert job.orders() == TWO
    job.say("h0", "stepped", step=2)
    assert re.match(rf"h1 \(pid \d\) has come; {re.escape(RAISED.text)}; healed: ", job.lines[-1])


def test_another_owner_goes_on_counting_attempts_and_a_job_has_no_more_nodes_than_its_most():
    job = Nodes()
    job.come("h1", steps=(4, 4), attempt=6)
    job.wait()
    assert job.last("h0")["attempt"] == job.last("h1")["attempt"] == 7
    job.say("h0", "stepped", step=5)
    job.come("h2", steps=(3, 3), attempt=9)  # it has been part of attempts that this owner does not know
    job.end(5, h0=0, h1=2)
    assert {job.last(host)["attempt"] for host in ("h0", "h1", "h2")} == {10}
    link = Connection("h3", 9)
    assert "has its 3 nodes already" in Nodes("h1", "h2").owner._refusal(link, 3)
    error = "h3 (pid 9) was started with --nnodes 4, h0 (pid 100) with --nnodes 3"
    assert Nodes().wait().owner._refusal(link, 4) == error


def test_a_signal_ends_the_job_of_all_nodes_and_says_how_to_take_out_one():
    job = Nodes("h1").wait()
    job.say("h1", "ended", [Failure(2, 130, "rank 2 was ended by SIGINT")], signals=[signal.SIGINT])
    job.say("h0", "ended", [KILLED])
    text = "SIGINT: all 4 ranks have ended; to take out one node, end its distopt run by SIGKILL"
    assert job.last("h0") == job.last("h1") == {"do": "finish", "code": 130, "text": text}
