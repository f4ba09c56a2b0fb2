"""Workers of a DiLoCo whose members change, by a service that the test plays: what they copy, send and apply.

A trial has one member here, so that its means are the changes which that one sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from distopt import codecs
from distopt.comm.base import Communicator
from distopt.comm.single import SingleCommunicator
from distopt.engine.engine import Engine
from distopt.launch.job.topology import Topology
from distopt.launch.workers.variables import Place
from distopt.torch.training import members as module
from distopt.torch.training.fragment import Fragment
from distopt.torch.training.parameters import TrainedParameter
from distopt.torch.training.workers import Workers
from tests.conformance.thread_ranks import on_ranks

ALONE = Topology.of_one_host(0, 1, "host")
DISTANCE = 3  # steps from one average to the next


class Client:
    """In the place of `WorkersClient`: notes what the worker says, and gives it the messages that the test has put."""

    number, host = 1, ""

    def __init__(self, place: Place, hello: dict[str, Any], provide: Callable[[], Any], seconds: float) -> None:
        self.said: list[dict[str, Any]] = []
        self.inbox: deque[dict[str, Any]] = deque()
        self.answers: dict[str, dict[str, Any]] = {}  # by what the worker says
        self.trial: int | None = None
        self.provide, self.giver = provide, provide

    def say(self, what: str, **content: Any) -> None:
        self.said.append({"say": what, **content})
        if (answer := self.answers.pop(what, None)) is not None:
            self.inbox.append(answer)

    def next(self, seconds: float | None = None) -> dict[str, Any] | None:
        if not self.inbox and seconds is None:
            raise AssertionError(f"the worker waits for the service, and has said {self.said}")
        return self.inbox.popleft() if self.inbox else None

    def take_part(self, trial: int) -> None:
        self.trial = trial

    def copy(self, host: str, port: int) -> Any:
        came = Came(*self.giver())
        self.inbox += [{"do": "header", "copy": came}, {"do": "copied", "copy": came}]
        return came

    def close(self) -> None:
        """Leave."""


class Came:
    """The states of another worker, which have come."""

    def __init__(self, header: dict[str, Any], states: bytes) -> None:
        self.header, self.states = header, states

    def stop(self) -> None:
        """It is over."""


class Worker:
    """A rank with one parameter of two elements; the test says what its steps add."""

    def __init__(self, *, copies: bool = False, lr: float = 0.1, communicator: Any = None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.inner = torch.optim.Adam([self.weight], lr=lr)
        outer = torch.optim.SGD([self.weight], lr=1.0)  # without momentum: averages are means of parameters
        single = SingleCommunicator(ALONE)
        params = [TrainedParameter("weight", self.weight)]
        self.fragment = Fragment(params, outer, Engine(single), (codecs.create("fp32"), 1000))
        self.workers = Workers(
            [self.fragment],
            outer,
            [],
            self.inner if copies else None,
            {},
            communicator or single,
            Place("", b""),
            distance=DISTANCE,
            delay=0,
            least=1,
            goal=None,
        )
        self.steps = 0

    @property
    def client(self) -> Any:
        return self.workers._members._client

    def begin(self) -> None:
        """Join as the first."""
        self.client.inbox.append({"do": "member", "average": 0, "of": 0, "steps": 0})
        self.steps = self.workers.join(0)

    def lead_to(self, giver: Worker) -> None:
        """Have it copy the states of a member, and be one from then on."""
        self.client.giver = giver.client.provide
        self.client.inbox.append({"do": "copy", "host": "", "port": 0})
        average = giver.workers.average
        self.client.answers["caught"] = {"do": "member", "average": average, "of": average, "steps": giver.steps}

    def name(self, average: int, *, counts: bool = True) -> None:
        """Name it as the one member of a trial, which counts or is aborted."""
        order: dict[str, Any] = {"do": "members", "average": average, "trial": average, "epoch": 1}
        order |= {"members": [1], "counting": [1]}
        order["steps"] = DISTANCE * average
        if average in self.ready_for():
            self.client.inbox.append(order)
        else:
            self.client.answers["ready"] = order
        end = {"do": "commit" if counts else "abort", "average": average, "trial": average}
        self.client.answers["averaged"] = end

    def step(self, change: float = 0.0) -> None:
        with torch.no_grad():
            self.weight += torch.tensor([change, 2 * change])
        self.steps = self.workers.count(self.steps + 1)

    def learn(self, grad: float) -> None:
        """A step of the inner optimizer."""
        self.weight.grad = torch.tensor([grad, 2 * grad])
        self.inner.step()
        self.step()

    def ready_for(self) -> list[int]:
        return [message["average"] for message in self.client.said if message["say"] == "ready"]

    @property
    def moments(self) -> list[float]:
        states = self.inner.state_dict()["state"]
        return [round(value, 5) for value in states[0]["exp_avg"].tolist()] if states else []

    @property
    def model(self) -> tuple[list[float], list[float]]:
        """The parameter, and its last average."""
        return self.weight.tolist(), self.fragment.averages[0].tolist()


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WorkersClient", Client)
    monkeypatch.setattr(module.Members, "_communicator_of", lambda _, order: SingleCommunicator(ALONE))


def late_worker() -> Worker:
    """A worker after 4 steps, which was left out of average 1, the mean of changes by 30, and has copied it."""
    other, late = Worker(), Worker()
    for worker in (other, late):
        worker.begin()
    other.name(1)
    for _ in range(DISTANCE):
        other.step(10.0)
    assert other.model == ([30.0, 60.0], [30.0, 60.0])
    late.client.answers["ready"] = {"do": "late", "average": 1}
    for _ in range(DISTANCE):
        late.step(1.0)
    assert late.ready_for() == [1]
    late.lead_to(other)
    late.step(1.0)
    assert late.model == ([34.0, 68.0], [30.0, 60.0])  # its changes have moved along
    assert late.ready_for() == [1, 2]
    return late


def test_a_late_worker_trains_on_until_the_members_are_ready() -> None:
    """All that it has learned until then counts, and its next average is a full distance later."""
    late = late_worker()
    late.step(1.0)  # without a wait
    late.name(2)
    late.step(1.0)
    assert late.model == ([36.0, 72.0], [36.0, 72.0])
    for _ in range(DISTANCE - 1):
        late.step(1.0)
    assert late.ready_for() == [1, 2]
    late.name(3)
    late.step(1.0)
    assert late.ready_for() == [1, 2, 3]
    assert late.model == ([39.0, 78.0], [39.0, 78.0])


def test_a_late_worker_waits_for_the_average_that_it_takes_part_in() -> None:
    """A trial that is aborted is one of the same changes again, without another step between."""
    late = late_worker()
    late.name(2, counts=False)
    with pytest.raises(AssertionError, match="waits for the service"):
        late.step(1.0)
    late.name(2)
    late.workers._members.wait()
    assert late.model == ([35.0, 70.0], [35.0, 70.0])


def test_a_late_worker_trains_on_for_one_distance() -> None:
    """Then it sends what it has learned by then, and waits."""
    late = late_worker()
    for _ in range(DISTANCE - 1):
        late.step(1.0)
    assert late.ready_for() == [1, 2]
    with pytest.raises(AssertionError, match="waits for the service"):
        late.step(1.0)
    assert late.ready_for() == [1, 2, 2]
    late.name(2)
    late.workers._members.wait()
    assert late.model == ([37.0, 74.0], [37.0, 74.0])


@pytest.mark.parametrize("copies", [True, False])
def test_a_newcomer_copies_the_moments_as_of_the_average(copies: bool) -> None:
    """All of its ranks; learning rates stay its own."""
    member = Worker(copies=copies)
    member.begin()
    member.name(1)
    for grad in (1.0, 2.0, 3.0):
        member.learn(grad)
    moments = member.moments
    member.learn(4.0)
    assert member.moments != moments

    def newcomes(comm: Communicator) -> None:
        rank = comm.topology.rank
        newcomer = Worker(copies=copies, lr=0.5 + rank, communicator=comm)
        if rank == 0:
            newcomer.lead_to(member)
        newcomer.steps = newcomer.workers.join(0)
        assert newcomer.moments == (moments if copies else [])
        assert newcomer.inner.param_groups[0]["lr"] == 0.5 + rank
        assert newcomer.model == (member.model[1], member.model[1])
        assert newcomer.steps == member.workers._members.steps
        newcomer.learn(1.0)  # from these states
        assert newcomer.inner.state_dict()["state"][0]["step"] == (4 if copies else 1)

    on_ranks(2, newcomes)
