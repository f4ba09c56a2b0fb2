"""The other workers of a DiLoCo whose members change, as the first rank of a worker sees them.

Who takes part in an average is decided by the service (`distopt.launch.workers`); what members send each other travels
over a communicator of their own, made anew when they change. A result is applied once the service says that it counts.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...codecs import BadGradient
from ...comm import Communicator
from ...comm.net.communicator import NetCommunicator
from ...comm.net.ucx import communicator_over_ucx
from ...comm.single import SingleCommunicator
from ...errors import CommunicatorError, LaunchError, MismatchError
from ...launch.workers.client import Copy, WorkersClient
from ...launch.workers.job import MembersJob
from ...launch.workers.membership import NOTHING
from ...launch.workers.variables import Place
from ...recorder.timeline import timeline
from ...settings import Settings
from .fragment import Fragment
from .gpu import via_host_of

_log = logging.getLogger("distopt")
_AGAIN_SECONDS = 0.1  # before states are copied again, since the members were about to have newer ones


class _Mean(NamedTuple):
    """The result of a trial.

    Attributes:
        trial: its number.
        average: the number of the average.
        steps: that the members had done.
        counting: the numbers of the workers whose changes it is made of.
        begin: when the trial began.
        means: of the changes.
        verdict: on them.
    """

    trial: int
    average: int
    steps: int
    counting: list[int]
    begin: float
    means: list[torch.Tensor]
    verdict: BadGradient | None


class Members:
    """Takes part in averages, copies the states of other members, and gives its own.

    Args:
        place: where the service is.
        facts: what must be equal on all workers, by what it is.
        fragments: of the model.
        outer: the optimizer of all fragments.
        others: tensors of the model that are not averaged, which newcomers copy, too.
        inner: the inner optimizer, if newcomers copy its states, too.
        least: how many workers must take part in an average.
        goal: the last average of the training, if it is known.

    Attributes:
        moments: the states of a member's inner optimizer after the last average, if newcomers copy them.
        average: the number of the last average that this worker holds, from 1; 0: the first states.
        steps: that the members had done when they sent the changes of that average.
        counting: the numbers of the workers whose changes it is made of.
        gone: how often a worker of one average was missing in the next.
        averaging_seconds: inside trials that counted.
        moves: how often its states have become others': by averages, and by copies.
        after_late: of a worker that was left out: it "trains" on, until the members are ready for an average that it
            takes part in; then it "waits" for that one. Otherwise empty.
        restarts: whether the steps to the next average are to be counted anew, as after such a change.
    """

    def __init__(
        self,
        place: Place,
        facts: Mapping[str, Any],
        fragments: Sequence[Fragment],
        outer: torch.optim.Optimizer,
        others: Sequence[torch.Tensor],
        inner: torch.optim.Optimizer | None,
        *,
        least: int,
        goal: int | None,
    ) -> None:
        self.average, self.steps = NOTHING, 0
        self.counting: list[int] = []
        self.gone = 0
        self.averaging_seconds = 0.0
        self.moves, self.restarts = 0, False
        self.after_late: Literal["", "trains", "waits"] = ""
        self._inner = inner
        self.moments: dict[int, Any] | None = None
        self._goal = goal  # the last average of the training
        self._trial = 0  # by which that average has counted
        self._due, self._sent_at = 0, 0  # the average that changes were sent for, and the steps done then
        self._fragments, self._outer, self._others = fragments, outer, others
        self._lock = threading.RLock()  # held while states change
        self._settings = Settings.from_env()
        self._communicator: Communicator | None = None
        self._network: NetCommunicator | None = None  # UCX; for parameters on a GPU, under the communicator
        self._epoch = 0  # of the communicator
        self._result: _Mean | None = None  # until it counts
        self._old: list[threading.Thread] = []  # close communicators
        # While it joins:
        self._joins, self._is_late, self._is_caught, self._may_leave = False, False, False, False
        self._copy: Copy | None = None
        self._heard: list[_Mean] = []  # since the states that are being copied
        self._kept: dict[Fragment, dict[str, Any]] = {}  # states of the codec, while others are used to listen
        self._counts = [fragment.counts for fragment in fragments]  # at the last average
        hello = {"model": dict(facts), "least": least, "fragments": len(fragments)}
        self._client = WorkersClient(place, hello, self._provide, self._settings.timeout)
        self._client.on_abort = self._abort

    @property
    def number(self) -> int:
        """Local. Of this worker among those that ever joined."""
        return self._client.number

    def _fragment_of(self, average: int) -> Fragment:
        return self._fragments[(average - 1) % len(self._fragments)]

    # -- for DiLoCo --------------------------------------------------------------------------------------------------
    def join(self, steps: int, average: int) -> None:
        """Wait until this worker holds what the members hold; its own states are after these numbers of each."""
        self.steps, self.average = steps, average
        self._begin_to_join(late=False)
        while self._joins:
            self._handle_next()

    def send(self, steps: int) -> None:
        """Note what has changed, and say that it can be averaged."""
        self.after_late = ""
        if self._joins:  # it sends when it has joined
            return
        self._due, self._sent_at = self.average + 1, steps
        self._fragment_of(self._due).note_changes()
        self._client.say("ready", average=self._due, steps=steps)

    def poll(self) -> None:
        """Take part in a trial that has been named."""
        while (message := self._client.next(0.0)) is not None:
            self._handle(message)

    def wait(self) -> None:
        """Wait until the changes that were sent count; or, if this worker was left out, until it may train on."""
        while self.after_late != "trains" and (self._joins or self.average < self._due):
            self._handle_next()

    def leave(self) -> None:
        """Say that this worker holds the last average, and stay until all others hold it."""
        while self._joins:
            self._handle_next()
        self._client.say("done", average=self.average, of=self._trial)
        while not self._may_leave:
            self._handle_next()
        self.close()

    def close(self) -> None:
        """Leave; idempotent."""
        self._client.close()
        self._retire()
        for thread in self._old:
            thread.join()

    # -- messages ----------------------------------------------------------------------------------------------------
    def _handle_next(self) -> None:
        message = self._client.next()
        assert message is not None
        self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        do, own = message["do"], message.get("copy") is not None and message.get("copy") is self._copy
        if do == "members":
            self._take_part(message)
        elif do == "commit" and self._result is not None and self._result.trial == message["trial"]:
            self._count(self._result)
        elif do == "abort" and self._result is not None and self._result.trial == message["trial"]:
            self._result = None
        elif do == "cut":
            self._result = None
            if self._joins:
                self._begin_to_join(late=self._is_late)
        elif do == "late":
            self._result = None
            self._begin_to_join(late=True)
        elif do == "member":
            self._joined(message)
        elif do == "copy":
            self._stop_copy()
            self._copy = self._client.copy(message["host"], message["port"])
        elif do == "header" and own:
            self._take_header(message["copy"].header)
        elif do == "copied" and own:
            self._catch_up()
        elif (do == "again" or (do == "lost" and own)) and self._joins:
            time.sleep(_AGAIN_SECONDS)
            self._begin_to_join(late=self._is_late)
        elif do == "leave":
            self._may_leave = True

    # -- averages ----------------------------------------------------------------------------------------------------
    def _take_part(self, order: dict[str, Any]) -> None:
        """Begin a trial and get its result, unless it fails or is aborted."""
        self._result, begin = None, time.perf_counter()
        average, counts = order["average"], self._client.number in order["counting"]
        fragment = self._fragment_of(average)
        try:
            self._client.take_part(order["trial"])
            communicator = self._communicator_of(order)
            if counts and self.after_late == "trains":
                self.after_late = "waits"
                fragment.withdraw()
                fragment.note_changes()
            states = fragment.own_states() if counts else self._states_to_listen(fragment)
            fragment.send_through(communicator, states, zero=not counts)
            means, verdict = fragment.finish()
        except MismatchError:
            raise
        except (CommunicatorError, LaunchError) as error:
            _log.info("worker %d: a trial of average %d has failed: %s", self.number, average, error)
            self._retire()
            timeline.add("failed average", begin, time.perf_counter(), "workers", average=average, why=str(error))
            self._client.say("failed", average=average, trial=order["trial"])
            return
        if (share := len(order["members"]) / len(order["counting"])) != 1:
            for mean in means:
                mean *= share
        self._result = _Mean(order["trial"], average, order["steps"], order["counting"], begin, means, verdict)
        self._client.say("averaged", average=average, trial=order["trial"])

    def _count(self, result: _Mean) -> None:
        """A result counts: apply it, or keep it until the states that it belongs to have come."""
        self._result, self._client.trial = None, None
        now = time.perf_counter()
        self.averaging_seconds += now - result.begin
        timeline.add("average", result.begin, now, "workers", average=result.average, members=result.counting)
        if not self._joins:
            self._apply(result)
            self._client.say("member", average=self.average, of=self._trial)
        else:
            result.means[:] = [mean.clone() for mean in result.means]
            self._heard.append(result)
            self._catch_up()

    def _apply(self, result: _Mean) -> None:
        with self._lock:
            self.average, self.steps, self._trial = result.average, result.steps, result.trial
            self._note_members(result.counting)
            self.moves += 1
            if self.after_late == "waits":
                self.after_late, self.restarts = "", True
            self._counts = [fragment.counts for fragment in self._fragments]
            self._fragment_of(result.average).take(result.means, result.verdict)
            if self._inner is not None and not self._joins:
                self.moments = copy.deepcopy(self._inner.state_dict()["state"])

    def _note_members(self, counting: list[int]) -> None:
        self.gone += len({*self.counting} - {*counting})
        if counting != self.counting:
            _log.info("average %d is of the workers %s", self.average, ", ".join(map(str, counting)))
            self.counting = counting

    # -- the communicator --------------------------------------------------------------------------------------------
    def _communicator_of(self, order: dict[str, Any]) -> Communicator:
        """Collective among the members. Their communicator."""
        if self._communicator is not None and self._epoch == order["epoch"]:
            return self._communicator
        self._retire()
        seconds, members = self._settings.timeout, order["members"]
        job = MembersJob(self._client, order["epoch"], members, seconds)
        if len(members) == 1:
            self._communicator = SingleCommunicator(job.topology)
        else:
            self._network = communicator_over_ucx(job, self._client.host, self._settings, alone=True)
            self._communicator = via_host_of(self._network, self._fragments[0].device)
        self._epoch = order["epoch"]
        if self._client.trial is None:
            raise LaunchError("the trial has been aborted")
        return self._communicator

    def _abort(self, reason: str) -> None:
        """Local. Abort the collectives of the members; called from another thread."""
        if self._network is not None:
            self._network.abort(reason)

    def _retire(self) -> None:
        """Close the communicator without a wait for others, which may be gone."""
        if self._communicator is not None:
            closing = threading.Thread(target=self._communicator.close, name="distopt closing")
            closing.start()
            self._old = [*(thread for thread in self._old if thread.is_alive()), closing]
        self._communicator = self._network = None

    # -- joining -----------------------------------------------------------------------------------------------------
    def _begin_to_join(self, *, late: bool) -> None:
        self._stop_copy()
        self._joins, self._is_late, self._is_caught = True, late, False
        self.after_late, self.restarts = ("trains", True) if late else ("", False)
        self._heard.clear()
        for fragment in self._fragments:
            fragment.withdraw()
        self._client.say(
            "join", late=late, average=self.average, of=self._trial, digest=self._digest(), steps=self.steps
        )

    def _stop_copy(self) -> None:
        if self._copy is not None:
            self._copy.stop()
        self._copy = None

    def _take_header(self, header: Mapping[str, Any]) -> None:
        """Take what must be equal before the first collective: the outer optimizer's options, and the counts."""
        for group, options in zip(self._outer.param_groups, header["groups"], strict=True):
            group.update(options)
        for fragment, counts in zip(self._fragments, header["counts"], strict=True):
            fragment.counts = counts
        self._client.say("listen", average=header["average"])

    def _catch_up(self) -> None:
        """Apply what has come of the states and of later averages."""
        if (came := self._copy) is None or not came.states:
            return
        with self._lock:
            if not self._is_caught:
                self._take_states(came.header, came.states)
            for result in self._heard:
                if result.average > self.average:
                    self._apply_to_average(result)
            self._heard.clear()
        if not self._is_caught:
            self._is_caught = True
            self._client.say("caught")

    def _take_states(self, header: Mapping[str, Any], content: bytes) -> None:
        states = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        self.moves += 1
        self.average, self.steps, self._counts = header["average"], header["steps"], header["counts"]
        self._note_members(header["counting"])
        if not self._is_late:
            for tensor, value in zip(self._others, states["others"], strict=True):
                tensor.detach().copy_(value)
            self.moments = states["moments"]
        for fragment, averages in zip(self._fragments, states["averages"], strict=True):
            fragment.move(averages, keep=self._is_late)
        self._outer.load_state_dict(states["outer"])

    def _apply_to_average(self, result: _Mean) -> None:
        """Take an outer step; the changes of a worker that is late move along."""
        fragment = self._fragment_of(result.average)
        changes = [x - average for x, average in zip(fragment.tensors, fragment.averages, strict=True)]
        self._apply(result)
        if self._is_late:
            for tensor, change in zip(fragment.tensors, changes, strict=True):
                tensor += change

    def _joined(self, message: Mapping[str, Any]) -> None:
        """The service counts this worker among the members."""
        self._stop_copy()
        if not self._is_caught:  # it has had these states from the start
            self.steps = message["steps"]
        self.average, self._trial, self._joins = message["average"], message["of"], False
        for fragment, states in self._kept.items():
            fragment.return_to(states)
        self._kept.clear()
        self._client.say("member", average=self.average, of=self._trial)
        if self._is_late:  # its changes have moved onto the new average
            self._is_late, self._due = False, self.average
            if self._goal is None or self.average < self._goal:
                self.send(self._sent_at)
                self.after_late, self.restarts = "trains", True

    def _states_to_listen(self, fragment: Fragment) -> dict[str, Any]:
        """States of the codec that send nothing. What this worker has not sent stays until it counts again."""
        self._kept.setdefault(fragment, fragment.own_states())
        return {"engine": {"steps": torch.tensor([*fragment.counts, 0, 0, 0])}}

    def _digest(self) -> str:
        """Of the states that newcomers copy."""
        digest = hashlib.sha256()
        for tensor in self._all_tensors():
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _all_tensors(self) -> list[torch.Tensor]:
        averages = [average for fragment in self._fragments for average in fragment.averages]
        kept = [value for state in self._outer.state.values() for value in state.values()]
        return [*averages, *self._others, *(value for value in kept if isinstance(value, torch.Tensor))]

    def _provide(self) -> tuple[dict[str, Any], memoryview]:
        """Local, from another thread. The states for a newcomer, and what it needs before them."""
        content = io.BytesIO()
        device = self._fragments[0].device
        with self._lock:
            if device.type == "cuda":  # by whose streams the training computes what is copied here
                torch.cuda.synchronize(device)
            options = [
                {key: value for key, value in group.items() if _is_plain(value)} for group in self._outer.param_groups
            ]
            header = {
                "average": self.average,
                "steps": self.steps,
                "counting": self.counting,
                "counts": self._counts,
                "groups": options,
            }
            averages = [fragment.averages for fragment in self._fragments]
            others = [tensor.detach() for tensor in self._others]
            states = {"averages": averages, "outer": self._outer.state_dict(), "others": others}
            torch.save({**states, "moments": self.moments}, content)
        return header, content.getbuffer()


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))
