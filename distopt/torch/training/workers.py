"""A worker of a DiLoCo whose members change: its ranks train as one, and the first of them talks to other workers."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...comm import Communicator
from ...errors import DistoptError, UsageError
from ...launch.workers.variables import Place, place_in
from ...recorder.statistics import WorkersStatistics
from .fragment import Fragment
from .members import Members
from .parameters import TrainedParameter, send_first


class Workers:
    """This worker among the others.

    Args:
        fragments: of the model.
        outer: the optimizer of all of them.
        others: tensors of the model that are not averaged, by name.
        inner: the inner optimizer, if newcomers copy its states, too.
        facts: see `Members`.
        communicator: of the ranks of this worker.
        place: where the service is.
        distance: steps from one average to the next.
        delay: steps from sending to applying.
        least: see `Members`.
        goal: the last average of the training, if it is known.

    Attributes:
        number: of this worker among those that ever joined.
        average: the number of the last average that this worker holds.
        waited_seconds: for others, since it joined, outside of averages that counted.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        outer: torch.optim.Optimizer,
        others: Sequence[tuple[str, torch.Tensor]],
        inner: torch.optim.Optimizer | None,
        facts: Mapping[str, Any],
        communicator: Communicator,
        place: Place,
        *,
        distance: int,
        delay: int,
        least: int,
        goal: int | None,
    ) -> None:
        """Collective among the ranks of this worker."""
        self._fragments, self._communicator, self._goal = fragments, communicator, goal
        self._others, self._distance, self._delay = others, distance, delay
        self._inner = inner
        self._members: Members | None = None
        self._has_joined = self._has_left = False
        self._since = 0  # steps since the last average
        self.average, self.waited_seconds = 0, 0.0
        if communicator.topology.rank == 0:
            tensors = [tensor for _, tensor in others]
            self._members = Members(place, facts, fragments, outer, tensors, inner, least=least, goal=goal)
            atexit.register(self.close)
        (self.number,) = self._numbers(self._members.number if self._members is not None else 0)

    def join(self, steps: int) -> int:
        """Collective in this worker, at its first call. Copy the states of the members; return their step."""
        if self._has_joined:
            return steps
        if self._members is not None:
            self._members.join(steps, self.average)
            steps = self._members.steps
        if self._inner is not None:
            self._take_moments(self._inner)
        self._has_joined, self._since = True, self._delay if self._receive() else 0
        (steps,) = self._numbers(steps + self._since)
        return steps

    def count(self, steps: int) -> int:
        """Collective in this worker, after a step. Send or apply what is due; return the number of steps.

        A worker that was left out trains on, and takes part in an average as soon as the members are ready for one. Its
        steps are theirs from then on.
        """
        self._since += 1
        is_due = self._since == self._distance + self._delay
        has_moved: int = False
        restarts: int = False
        if (members := self._members) is not None:
            moves = members.moves
            if self._since == self._distance:
                members.send(steps)
            members.poll()
            if is_due or members.after_late == "waits":
                self._wait(members)
            has_moved, restarts, members.restarts = members.moves != moves, members.restarts, False
            steps = max(steps, members.steps)
        if self._communicator.topology.world_size > 1:
            has_moved, restarts, steps = self._numbers(has_moved, restarts, steps)
        if has_moved:
            self._receive()
        if is_due or restarts:
            self._since = 0 if restarts else self._delay
        return steps

    def _wait(self, members: Members) -> None:
        begin, before = time.perf_counter(), members.averaging_seconds
        members.wait()
        self.waited_seconds += max(0.0, time.perf_counter() - begin - (members.averaging_seconds - before))

    @property
    def finished(self) -> bool:
        """Collective in this worker. Whether it holds the last average; it then leaves, when all others hold it."""
        if self._goal is None or self.average < self._goal:
            return False
        if self._members is not None and not self._has_left:
            self._members.leave()
        self._has_left = True
        return True

    def stats(self) -> WorkersStatistics:
        """Local. The members are known on the first rank of a worker alone."""
        members, gone = ([], 0) if self._members is None else (self._members.counting, self._members.gone)
        return WorkersStatistics(self.average, tuple(members), gone, self.waited_seconds)

    def resume(self, average: int) -> None:
        """Local. The states of the fragments, which were loaded, are of this average."""
        if self._has_joined:
            raise UsageError("this worker has joined the others already; resume before the first step")
        self.average = average

    def close(self) -> None:
        """Local. Leave; idempotent."""
        if self._members is not None:
            with contextlib.suppress(DistoptError):
                self._members.close()

    def _take_moments(self, inner: torch.optim.Optimizer) -> None:
        """Collective in this worker. Use the states of a member's inner optimizer, if this worker has copied them."""
        content = io.BytesIO()
        if self._members is not None and self._members.moments is not None:
            torch.save(self._members.moments, content)
        row = np.frombuffer(content.getvalue(), np.uint8).copy()
        if self._communicator.topology.world_size > 1:
            (size,) = self._numbers(len(row))
            row = row if self._members is not None else np.empty(size, np.uint8)
            self._communicator.broadcast(row, label="moments of a member").wait()
        if len(row):
            moments = torch.load(io.BytesIO(row.tobytes()), map_location="cpu", weights_only=True)
            inner.load_state_dict({**inner.state_dict(), "state": moments})

    def _receive(self) -> int:
        """Collective in this worker. Give all of its ranks what the first one holds; the number of the average."""
        if self._members is not None:
            self.average = self._members.average
        if self._communicator.topology.world_size > 1:
            (self.average,) = self._numbers(self.average)
            averages = [(f"average {i}", each) for f in self._fragments for i, each in enumerate(f.averages)]
            tensors = [(f"parameter {i}", each) for f in self._fragments for i, each in enumerate(f.tensors)]
            send_first(self._communicator, [*averages, *tensors, *self._others])
        return self.average

    def _numbers(self, *numbers: int) -> list[int]:
        """Collective in this worker. Numbers of its first rank."""
        row = np.array(numbers, np.int64)
        self._communicator.broadcast(row, label="numbers of a worker").wait()
        return [int(number) for number in row]


def place_of_workers(min_workers: int | None) -> Place | None:
    """Local. Where the service is; None if the members do not change.

    Raises:
        UsageError: `min_workers` is given without `distopt run --workers`, or is missing with it.
    """
    place = place_in(os.environ)
    if min_workers is not None and place is None:
        raise UsageError(
            f"min_workers={min_workers}: members can change only where each worker has a world of its own; start the "
            "script by distopt run --heal --workers node (or rank), or leave min_workers out"
        )
    if min_workers is None and place is not None:
        raise UsageError(
            "distopt run --workers starts workers that know of each other by DiLoCo(min_workers=) alone; give it, or "
            "leave --workers out"
        )
    return place


def summary_of(params: Sequence[TrainedParameter]) -> str:
    """Local. Names, shapes and types of parameters, in short: equal for equal models."""
    text = "; ".join(f"{param.name} {list(param.tensor.shape)} {param.tensor.dtype}" for param in params)
    elements = sum(param.tensor.numel() for param in params)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{len(params)} parameters from {text.partition(';')[0]}, {elements:,} elements, digest {digest}"
