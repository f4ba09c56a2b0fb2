"""Who takes part in an average of workers that come and go, and when it counts. No sockets, no clock, no threads.

An average goes through trials. A trial has members: the workers that are ready, and those that listen, with weight 0,
because they are still copying the states. It counts when all members that remain have the result; until then no member
applies it. If one is lost before, the trial ends without a result, and the others send the same once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SILENT_SECONDS = 1.2  # then a worker without a sign of life counts as cut off
_LAST_CALL_SECONDS = 3.0  # after the last worker has come, training begins without the others
_AWAY_SECONDS = 10.0  # then the others go back to older states, if a worker that is cut off alone holds the newest
_SAY_SECONDS = 2.0  # then a line says that workers are missing
NOTHING = -1  # the average that a worker holds which has no states


@dataclass(eq=False)
class Worker:
    """A worker, as the service sees it.

    Attributes:
        number: among those that ever joined.
        name: in messages.
        send: sends it a message.
        host: where others reach it.
        port: where others copy its states.
        heard: when it gave the last sign of life.
        least: how many workers must take part in an average.
        fragments: of its model, which are averaged in turn.
        holds: the number of the average that its states belong to, or `NOTHING`.
        trial: the trial that this average has counted by.
        digest: of these states, when it came.
        steps: that it had done when it came.
        wants: the average that it has a change for; None: it computes.
        phase: "new", it has not asked for states; "joins", it waits for some; "copies", it has an address; "asks", it
            wants to listen; "listens"; "member"; "done".
        is_late: whether it was a member, was left out, and has not counted since.
        base: the average whose states it copies.
        has_listened: whether an average has counted while it listened.
        has_caught: whether it has all states.
        is_away: whether it gives no sign of life.
    """

    number: int
    name: str
    send: Callable[[dict[str, Any]], None]
    host: str = ""
    port: int = 0
    heard: float = 0.0
    least: int = 1
    fragments: int = 1
    holds: int = NOTHING
    trial: int = 0
    digest: str = ""
    steps: int = 0
    wants: int | None = None
    phase: str = "new"
    is_late: bool = False
    base: int = NOTHING
    has_listened: bool = False
    has_caught: bool = False
    is_away: bool = False


@dataclass
class Trial:
    """A trial of an average.

    Attributes:
        average: its number.
        number: of the trial, never used again.
        members: the workers that take part.
        done: those that have the result.
    """

    average: int
    number: int
    members: list[Worker]
    done: set[int] = field(default_factory=set)


class Membership:
    """The decisions about workers and averages.

    Args:
        most: how many workers there can be: training begins at once when all have come.
        say: prints a line.
        first: the number before that of the first trial and of the first communicator; another one for each service.
        numbers: how many workers have ever joined, as far as is known.
        decides: whether this service may decide now; otherwise another one may.

    Attributes:
        workers: those that have a connection, by number.
        counted: the last average that counts; None: no worker has states yet.
        epoch: number of the communicator of the current members.
        numbers: how many workers have ever joined.
        finished: whether the training has ended.
    """

    def __init__(
        self,
        most: int,
        say: Callable[[str], None],
        first: int = 0,
        *,
        numbers: int = 0,
        decides: Callable[[], bool] = lambda: True,
    ) -> None:
        self._most, self._say, self._decides = most, say, decides
        self.workers: dict[int, Worker] = {}
        self.counted: int | None = None
        self.epoch = first
        self.finished = False
        self._trial: Trial | None = None
        self._trials = first
        self._has_counted = False  # an average, by this service
        self._counted_by = 0  # the trial of the last average that counts
        self.numbers = numbers
        self._model: dict[str, Any] | None = None
        self._of_epoch: list[int] = []
        self._came_at = 0.0
        self._ready_since: float | None = None
        self._not_before = 0.0  # when to name members again after a failure that no loss explains
        self._said_at: float | None = None  # since when too few are ready
        self._ended: set[int] = set()  # numbers of workers that have left with the last average

    # -- what workers say --------------------------------------------------------------------------------------------
    def hello(
        self, message: dict[str, Any], name: str, host: str, send: Callable[[dict[str, Any]], None], now: float
    ) -> Worker | None:
        """A worker has come, or come back; None if it is refused."""
        model = message["model"]
        if self._model is not None and self.workers and model != self._model:
            differing = next(key for key in model if model[key] != self._model.get(key))
            text = f"{name} has {differing} {model[differing]}, the members have {self._model.get(differing)}"
            self._say(f"refused: {text}")
            send({"do": "refuse", "text": f"{text}; start it with the same model and the same options"})
            return None
        self._model = model
        number = message["number"]
        if number is None:
            number = self.numbers
        elif (before := self.workers.pop(number, None)) is not None:
            self._lose(before, now, "")
        self.numbers = max(self.numbers, number + 1)
        worker = Worker(number, f"worker {number}, {name}", send, host, message["port"], now)
        worker.least, worker.fragments = message["least"], message["fragments"]
        self.workers[number] = worker
        self._came_at = now
        send({"do": "welcome", "number": number})
        return worker

    def hear(self, worker: Worker, message: dict[str, Any], now: float) -> None:
        """Act on a message of a worker."""
        worker.heard, worker.is_away = now, False
        say, average = message["say"], message.get("average", NOTHING)
        if say == "beat":
            worker.send({"do": "beat"})
        elif say == "join":
            worker.phase, worker.is_late, worker.steps = "joins", message["late"], message["steps"]
            worker.holds, worker.trial, worker.digest = average, message["of"], message["digest"]
            worker.has_listened = worker.has_caught = False
            worker.wants = None
        elif say == "member":  # after a new service has begun
            if self.counted is None:  # this service is new: others come, too
                self._not_before = now + SILENT_SECONDS
            self._return(worker, average, message["of"])
        elif say == "listen":
            worker.phase, worker.base = "asks", average
        elif say == "caught":
            worker.has_caught = True
        elif say == "ready":
            worker.wants, worker.steps = average, message["steps"]
        elif say == "averaged":
            if self._is_current(message):
                self._trial.done.add(worker.number)  # type: ignore[union-attr]
        elif say == "failed":
            if self._is_current(message):
                self._not_before = now + SILENT_SECONDS
                self._abort()
        elif say == "done":
            worker.phase, worker.holds, worker.trial, self.finished = "done", average, message["of"], True
        elif say == "bye":
            self.lost(worker, now, "has left")
        self.check(now)

    def _return(self, worker: Worker, average: int, trial: int) -> None:
        """A member has connected again, perhaps to another service. The newest average that a member holds counts.

        Once the others have taken a further average, this is final: a member with a newer average was apart from them,
        by `--alone`.
        """
        worker.phase, worker.holds, worker.trial = "member", average, trial
        if self.counted is None or (average > self.counted and not self._has_counted):
            self.counted, self._counted_by, self._trial = average, trial, None
        elif (average, trial) != (self.counted, self._counted_by):
            worker.send({"do": "late", "average": self.counted})

    def lost(self, worker: Worker, now: float, how: str = "has ended or cannot be reached") -> None:
        """A worker's connection has ended."""
        if self.workers.get(worker.number) is worker:
            del self.workers[worker.number]
            if worker.phase == "done":
                self._ended.add(worker.number)
            self._lose(worker, now, "" if worker.is_away else how)
            self.check(now)

    def _is_current(self, message: dict[str, Any]) -> bool:
        return self._trial is not None and self._trial.number == message["trial"]

    def _lose(self, worker: Worker, now: float, how: str) -> None:
        left = len(self._living())
        if worker.phase != "done" and how:
            self._say(f"{worker.name} {how}; {left} {'worker goes' if left == 1 else 'workers go'} on")
        self._not_before = 0.0
        trial = self._trial
        if trial is not None and worker in trial.members:
            trial.members.remove(worker)
            if not trial.members or any(member.number not in trial.done for member in trial.members):
                self._abort()

    @property
    def summary(self) -> dict[str, Any]:
        """The last average that counts, and the numbers of the members and of the workers that are lost."""
        members = sorted(worker.number for worker in self._living() if worker.phase == "member")
        here = {worker.number for worker in self._living()} | self._ended
        lost = [number for number in range(self.numbers) if number not in here]
        return {"average": self.counted, "members": members, "lost": lost}

    # -- decisions ---------------------------------------------------------------------------------------------------
    def wake(self, now: float) -> None:
        """The service was suspended, and has heard nothing."""
        for worker in self.workers.values():
            worker.heard = now

    def check(self, now: float) -> None:
        """Act on what has changed, and on the time, if this service may decide."""
        if not self._decides():
            return
        for worker in list(self.workers.values()):
            if not worker.is_away and now - worker.heard > SILENT_SECONDS:
                worker.is_away = True
                self._lose(worker, now, f"has given no sign of life for {SILENT_SECONDS} s")
        self._count()
        self._found(now)
        if self.counted is None:
            return
        for worker in self._living():
            self._admit(worker)
        if self._trial is None:
            self._name(now)
        self._release()

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.is_away]

    def _count(self) -> None:
        """The trial counts if all that remain have the result."""
        trial = self._trial
        if trial is None or any(member.number not in trial.done for member in trial.members):
            return
        self._trial, self.counted, self._counted_by, self._has_counted = None, trial.average, trial.number, True
        for member in trial.members:
            if member.phase == "listens":
                member.has_listened = True
            else:
                member.holds, member.trial, member.is_late = trial.average, trial.number, False
            member.wants = None
            member.send({"do": "commit", "average": trial.average, "trial": trial.number})

    def _abort(self) -> None:
        trial, self._trial = self._trial, None
        self._of_epoch = []  # its communicator is of no use any more
        for member in trial.members if trial is not None else ():
            member.send({"do": "abort", "trial": trial.number})  # type: ignore[union-attr]

    def _found(self, now: float) -> None:
        """Begin with the states of one worker, where none holds those of the last average that counts."""
        holders = [worker for worker in self.workers.values() if now < worker.heard + _AWAY_SECONDS]
        if any(self._holds_last(worker) for worker in holders):
            return
        here = [worker for worker in self._living() if worker.phase not in {"new", "done"}]
        if not here or (len(here) < self._most and now < self._came_at + _LAST_CALL_SECONDS):
            return
        if self._too_few(len(here), max(worker.least for worker in here), now):
            return
        first = max(here, key=lambda worker: (worker.holds, -worker.number))
        if self.finished and first.holds == NOTHING:
            text = f"the training has ended with average {self.counted}, and all who hold it have left"
            for worker in here:
                worker.send({"do": "refuse", "text": f"{text}; read it from their files"})
                worker.phase = "done"
            return
        first.holds = max(first.holds, 0)
        self.counted, self._counted_by, self._trial = first.holds, first.trial, None
        same = [worker for worker in here if worker.digest == first.digest and not worker.is_late]
        names = ", ".join(worker.name for worker in here)
        self._say(f"training begins with average {self.counted} of {first.name}: {names}")
        for worker in {first, *same}:
            self._make_member(worker, first.steps)

    def _make_member(self, worker: Worker, steps: int) -> None:
        assert self.counted is not None
        worker.phase, worker.holds, worker.trial = "member", self.counted, self._counted_by
        worker.send({"do": "member", "average": self.counted, "of": self._counted_by, "steps": steps})

    def _holds_last(self, worker: Worker) -> bool:
        """Whether a worker holds the states after the last average that counts."""
        return worker.phase in {"member", "done"} and (worker.holds, worker.trial) == (self.counted, self._counted_by)

    def _admit(self, worker: Worker) -> None:
        """Lead a worker that has no states, or older ones, to those of the members."""
        assert self.counted is not None
        trial = self._trial
        takes_part = trial is not None and worker in trial.members
        if worker.phase == "member" and worker.wants is not None and worker.wants <= self.counted and not takes_part:
            worker.wants = None
            worker.send({"do": "late", "average": self.counted})
        elif worker.phase == "joins":
            givers = [one for one in self._living() if self._holds_last(one)]
            if givers:
                giver = min(givers, key=lambda one: (one.wants is not None, one.number))
                worker.phase = "copies"
                worker.send({"do": "copy", "host": giver.host, "port": giver.port})
        elif worker.phase == "asks" and trial is None:
            worker.phase = "listens" if worker.base == self.counted else "joins"
            worker.send({"do": "listen" if worker.phase == "listens" else "again", "average": worker.base})
        elif worker.phase == "listens" and worker.has_caught and not takes_part and self._may_count(worker):
            self._make_member(worker, worker.steps)
            verb = "is back" if worker.is_late else "has joined"
            self._say(f"{worker.name} {verb} with average {self.counted}")

    def _may_count(self, worker: Worker) -> bool:
        """Whether a worker that has all states is a member: it has listened, or there is nothing to listen to.

        Its first average is one of the first fragment, so that it counts in all fragments of a round, or in none.
        """
        assert self.counted is not None
        members = sum(one.phase == "member" for one in self._living())
        has_listened = worker.has_listened and self.counted % worker.fragments == 0
        return has_listened or worker.is_late or self.finished or members < worker.least

    def _name(self, now: float) -> None:
        """Name the members of the next trial, if it is time to."""
        assert self.counted is not None
        living, wanted = self._living(), self.counted + 1
        members = [worker for worker in living if worker.phase == "member"]
        ready = [worker for worker in members if worker.wants == wanted and self._holds_last(worker)]
        # A worker that was left out is ready at once; the average need not hurry for that.
        punctual = [worker for worker in members if not worker.is_late]
        if 2 * sum(worker in ready for worker in punctual) < len(punctual):
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        if not ready or now < self._not_before:
            return
        grace = self._model["grace"] if self._model else 0.0
        assert self._ready_since is not None or len(ready) < len(members)
        if len(ready) < len(members) and (self._ready_since is None or now < self._ready_since + grace):
            return
        if self._too_few(len(ready), max(worker.least for worker in ready), now):
            return
        self._ready_since = None
        self._trials += 1
        taking = [*ready, *(worker for worker in living if worker.phase == "listens")]
        taking.sort(key=lambda worker: worker.number)
        numbers = [worker.number for worker in taking]
        if numbers != self._of_epoch:
            self.epoch, self._of_epoch = self.epoch + 1, numbers
        self._trial = Trial(wanted, self._trials, taking)
        order = {"do": "members", "average": wanted, "trial": self._trials, "epoch": self.epoch, "members": numbers}
        order |= {"counting": sorted(worker.number for worker in ready), "steps": max(worker.steps for worker in ready)}
        for worker in taking:
            worker.send(order)

    def _too_few(self, count: int, least: int, now: float) -> bool:
        if count >= least:
            self._said_at = None
            return False
        if self._said_at is None:
            self._said_at = now + _SAY_SECONDS
        elif now > self._said_at:
            self._said_at = float("inf")
            self._say(f"{count} of the {least} workers that DiLoCo asks for (min_workers) are there; waiting for more")
        return True

    def _release(self) -> None:
        """Let workers leave when all that live hold the last average."""
        if self.finished and all(worker.phase == "done" for worker in self._living()):
            for worker in self._living():
                worker.send({"do": "leave"})
