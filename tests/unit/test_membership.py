"""Workers that come and go: which averages count, on schedules of losses, silences and returns drawn at random."""

import random
from typing import Any

import pytest

from distopt.launch.workers.membership import NOTHING, SILENT_SECONDS, Membership

MODEL = {"a model of": "1 parameter", "grace": 1.0}


class Worker:
    """A worker whose states are the history of the averages that it has applied."""

    def __init__(self, net: "Net", *, least: int = 1, fragments: int = 1, model: dict[str, Any] = MODEL) -> None:
        self.net, self.history, self.reached = net, (), True
        self.inbox: list[dict[str, Any]] = []
        self.phase, self.is_late, self.result, self.copied, self.heard = "joins", False, None, None, []
        self.computes_until, self.refused, self.left = net.now, "", False
        self.listened, self.joined_at, self.must_return = 0, None, False
        hello = {"model": model, "number": None, "least": least, "fragments": fragments, "port": 1}
        self.worker = net.membership.hello(hello, f"host {len(net.workers)}", "host", self.inbox.append, net.now)
        net.workers.append(self)
        if self.worker is not None:
            self.join()

    @property
    def average(self) -> int:
        return len(self.history)

    @property
    def trial(self) -> int:
        return self.history[-1][1] if self.history else 0

    def say(self, what: str, **content: Any) -> None:
        if self.reached and self.worker is not None and not self.must_return:
            self.net.membership.hear(self.worker, {"say": what, **content}, self.net.now)

    def join(self, late: bool = False) -> None:
        self.phase, self.is_late, self.copied, self.heard, self.result = "joins", late, None, [], None
        digest = str(self.history)
        average = self.average if self.history else NOTHING
        self.say("join", late=late, average=average, of=self.trial, digest=digest, steps=0)

    def act(self) -> None:
        if not self.reached:
            return
        if self.must_return:
            self.come_back()
        while self.inbox and not self.left:
            self.handle(self.inbox.pop(0))
        if self.phase == "again":
            self.join(self.is_late)
        if self.phase == "computes" and self.net.now >= self.computes_until:
            self.phase = "waits"
            self.say("ready", average=self.average + 1, steps=self.average)

    def come_back(self) -> None:
        self.must_return, self.result = False, None
        self.inbox.clear()
        hello = {"model": MODEL, "number": self.worker.number, "least": 1, "fragments": 1, "port": 1}
        self.worker = self.net.membership.hello(hello, "host", "host", self.inbox.append, self.net.now)
        if self.phase in {"joins", "again"}:
            self.join(self.is_late)
        else:
            what = "done" if self.phase == "done" else "member"
            self.say(what, average=self.average, of=self.trial)
            if self.phase == "waits":
                self.say("ready", average=self.average + 1, steps=self.average)

    def handle(self, message: dict[str, Any]) -> None:
        do = message["do"]
        if do == "refuse":
            self.refused = message["text"]
        elif do == "copy":
            givers = [one for one in self.net.workers if one.phase in {"computes", "waits", "done"} and one.reached]
            if givers:
                self.copied = max((one.history for one in givers), key=len)
                self.say("listen", average=len(self.copied))
            else:  # none can be reached, which the service does not know yet
                self.phase = "again"
        elif do == "again":
            self.phase = "again"
        elif do == "listen":
            self.say("caught")
        elif do == "member":
            if self.copied is not None:
                self.catch_up()
                self.history = self.copied
            assert self.average == message["average"]
            self.joined_at = self.average
            self.go_on()
        elif do == "members":
            self.result = message["average"], message["trial"], tuple(message["counting"])
            self.say("averaged", average=message["average"], trial=message["trial"])
        elif do in {"abort", "commit"} and self.result is not None and self.result[1] == message["trial"]:
            result, self.result = self.result, None
            if do == "commit" and self.phase == "joins":
                self.heard.append(result)
                self.listened += 1
                self.catch_up()
            elif do == "commit":
                assert self.worker.number in result[2]
                self.history += (result,)
                self.go_on()
        elif do == "late":
            self.join(late=True)
        elif do == "leave":
            self.left = True

    def catch_up(self) -> None:
        for result in self.heard:
            if result[0] == len(self.copied) + 1:
                self.copied += (result,)
        self.heard = []

    def go_on(self) -> None:
        if self.average >= self.net.goal:
            self.phase = "done"
            self.say("done", average=self.average, of=self.trial)
        else:
            self.phase = "computes"
            self.computes_until = self.net.now + self.net.numbers.uniform(0.2, 0.4)


class Net:
    """A service, and the workers that begin with it."""

    def __init__(self, count: int = 0, seed: int = 0, *, goal: int = 30, **options: Any) -> None:
        self.numbers, self.now, self.goal = random.Random(seed), 0.0, goal
        self.lines: list[str] = []
        self.membership = Membership(4, self.lines.append)
        self.workers: list[Worker] = []
        for _ in range(count):
            Worker(self, **options)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            for worker in self.numbers.sample(self.workers, len(self.workers)):
                worker.say("beat")
                worker.act()
            self.membership.check(self.now)

    def replace_service(self) -> None:
        """The service ends; another one knows how many have joined, and has other numbers for trials and epochs."""
        before = self.membership
        self.membership = Membership(4, self.lines.append, self.numbers.getrandbits(40), numbers=before.numbers)
        for worker in self.workers:
            worker.must_return = True

    def reach_all(self) -> None:
        for worker in self.workers:
            worker.reached = True

    def finish(self) -> None:
        self.reach_all()
        self.run(60)
        self.check()
        assert all(worker.left and worker.average == self.goal for worker in self.workers), self.lines

    def lose(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.reached = False
        self.membership.lost(worker.worker, self.now)

    def check(self) -> None:
        """Nobody holds another model than the rest: histories are beginnings of one."""
        longest = max((one.history for one in self.workers), key=len)
        for worker in self.workers:
            assert worker.history == longest[: worker.average]
        assert [entry[0] for entry in longest] == list(range(1, len(longest) + 1))


def test_all_begin_together_and_the_first_wait_for_others_a_moment() -> None:
    net = Net(4, goal=3)
    net.run(3)
    assert all(counting == (0, 1, 2, 3) for _, _, counting in net.workers[0].history)
    net.finish()
    net = Net(1, goal=100)
    net.run(2.5)
    assert net.workers[0].phase == "joins"
    net.run(1.5)
    assert net.workers[0].average > 0


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_newcomer_listens_and_counts_from_the_first_fragment_on(fragments: int) -> None:
    net = Net(2, goal=100, fragments=fragments)
    net.run(6)
    newcomer = Worker(net, fragments=fragments)
    net.run(3 * fragments)
    assert newcomer.joined_at is not None
    assert newcomer.joined_at % fragments == 0
    assert 1 <= newcomer.listened <= fragments
    counting = [entry[2] for entry in newcomer.history]
    assert counting[newcomer.joined_at - 1 :][:2] == [(0, 1), (0, 1, 2)]
    net.check()


def test_the_summary_names_members_and_those_that_are_lost() -> None:
    """One that is frozen is lost until it is back; those that end with the training are not lost."""
    net = Net(goal=100)
    assert net.membership.summary == {"average": None, "members": [], "lost": []}
    workers = [Worker(net) for _ in range(3)]
    net.run(4)
    net.lose(workers[1])
    for reached, seconds, members, lost in ((False, SILENT_SECONDS + 0.7, [0], [1, 2]), (True, 3, [0, 2], [1])):
        workers[2].reached = reached
        net.run(seconds)
        summary = net.membership.summary
        assert (summary["members"], summary["lost"]) == (members, lost)
    assert abs(summary["average"] - workers[0].average) <= 1
    net.run(100)
    for worker in list(net.workers):
        net.lose(worker)
    assert net.membership.summary == {"average": 100, "members": [], "lost": [1]}


def test_too_few_wait_and_say_so() -> None:
    net = Net(2, goal=1000, least=2)
    first, second = net.workers
    net.run(6)
    net.lose(second)
    average = first.average
    net.run(5)
    assert first.average == average
    assert any("1 of the 2 workers" in line for line in net.lines)
    Worker(net, least=2)
    net.run(5)
    assert first.average > average + 3


def test_newcomers_with_another_model_or_after_the_end_are_refused() -> None:
    net = Net(1)
    other = Worker(net, model={**MODEL, "a model of": "2 parameters"})
    assert other.worker is None
    other.act()
    assert "host 1 has a model of 2 parameters, the members have 1 parameter" in other.refused
    net = Net(2, goal=3)
    for worker in list(net.workers):
        net.run(3)
        net.lose(worker)
    newcomer = Worker(net)
    net.run(5)
    assert "the training has ended with average 3" in newcomer.refused


def test_one_that_is_late_or_frozen_is_left_out_and_counts_in_the_next() -> None:
    net = Net(3, goal=1000)
    slow = net.workers[0]
    net.run(2)
    while slow.phase != "computes":
        net.run(0.05)
    slow.computes_until = net.now + 2.5
    net.run(6)
    left_out = [entry for entry in slow.history if 0 not in entry[2]]
    assert 1 <= len(left_out) <= 2
    assert 0 in slow.history[-1][2]
    net.check()
    net = Net(2, goal=1000)
    frozen, other = net.workers
    net.run(2)
    frozen.reached = False
    net.run(SILENT_SECONDS + 0.7)
    average = other.average
    net.run(2)
    assert other.average >= average + 3
    frozen.reached = True
    net.run(3)
    assert frozen.is_late or frozen.average >= other.average - 1
    net.run(3)
    assert 0 in other.history[-1][2]
    assert all(1 in entry[2] for entry in other.history)  # the one that is back, and ready at once, hurries nobody
    net.check()


def test_a_service_without_a_lease_counts_nothing_and_another_one_has_other_numbers() -> None:
    net = Net(goal=1000)
    leases = [True]
    net.membership = Membership(4, net.lines.append, decides=lambda: leases[-1])
    workers = [Worker(net) for _ in range(2)]
    net.run(6)
    leases.append(False)
    net.run(0.05)  # what has counted before arrives
    averages = [worker.average for worker in workers]
    net.run(5)
    assert [worker.average for worker in workers] == averages
    leases.append(True)
    net.run(2)
    assert min(worker.average for worker in workers) > max(averages)
    net.check()
    # Of communicators, so that no worker takes an old one for the new; and of workers, whose data they seed.
    net = Net(2, goal=1000)
    first, lost = net.workers
    net.run(6)
    epoch = net.membership.epoch
    net.lose(lost)
    net.replace_service()
    newcomer = Worker(net)
    net.run(3)
    assert (newcomer.worker.number, first.worker.number) == (2, 0)
    assert net.membership.epoch > epoch + 100


@pytest.mark.parametrize("ahead", [True, False])
def test_one_that_went_on_alone_follows_the_others(ahead: bool) -> None:
    """Also if it has counted more averages than they."""
    net = Net(3, goal=1000)
    apart, *others = net.workers
    net.run(2)
    net.workers.remove(apart)
    net.replace_service()
    net.run(5)
    counted = others[0].average
    assert counted > apart.average
    apart.history += tuple((n, -n, (0,)) for n in range(apart.average + 1, counted + (9 if ahead else -1)))
    apart.must_return, apart.phase = True, "waits"
    net.workers.append(apart)
    net.run(3)
    assert all(worker.average > counted for worker in others)
    assert 0 in others[0].history[-1][2]
    net.check()


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    net = Net(4, seed, goal=60)
    for _ in range(30):
        net.run(net.numbers.choice([0.05, 0.1, 0.3, 1.0]))
        living = [worker for worker in net.workers if worker.reached]
        what = net.numbers.random()
        if what < 0.3 and len(living) > 1:
            net.lose(net.numbers.choice(living))
        elif what < 0.5 and len(living) > 1:
            net.numbers.choice(living).reached = False
        elif what < 0.7:
            net.reach_all()
        elif len(net.workers) < 4:
            Worker(net)
        net.check()
    net.finish()


@pytest.mark.parametrize("seed", range(20))
def test_another_service_takes_over(seed: int) -> None:
    """Where the last average had counted for a worker that nobody reaches, the others go another way; it follows."""
    net = Net(4, seed, goal=60)
    for _ in range(8):
        net.run(net.numbers.choice([0.05, 0.3, 1.0, 2.0]))
        if len([worker for worker in net.workers if worker.reached]) > 1 and net.numbers.random() < 0.5:
            net.numbers.choice(net.workers).reached = False
        net.replace_service()
        net.run(net.numbers.choice([0.1, 2.0, 14.0]))
        net.reach_all()
    net.finish()
