"""DiLoCo: ranks train on their own for some steps, then average what has changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1.
The model in fragments, which are sent in turn and arrive later: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, section 2; with the codec `Quantized(4)`, changes take 4 bits, which there are floats.
SparseLoCo (Sarfi et al., arXiv 2508.15706, algorithm 1) is DiLoCo with the codec `ErrorFeedback(ChunkedTopK(64),
decay=beta)` and the outer optimizer `SGD(model.parameters(), lr=alpha)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from ... import codecs
from ...checks import check_integer, check_number
from ...codecs import Codec, CommunicationStatistics
from ...engine.engine import DEFAULT_BUCKET_ELEMENTS, Engine, NonFinite
from ...errors import StateError, UsageError
from ...launch.workers.variables import Place
from ..ddp.plain_model import plain_model
from .communicator import communicator_of
from .fragment import Fragment, parts_of
from .gpu import current_stream, on_current_stream
from .parameters import (
    HeldParameters,
    device_of,
    mean_of,
    send_first,
    trained_parameters,
)
from .workers import Workers, place_of_workers, summary_of


class DiLoCo:
    """Trains each rank by `inner_optimizer` alone, and averages the changes over the ranks every `sync_every` steps.

    The change of a parameter since the last average, with the opposite sign, is the gradient of the outer optimizer:
    `torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)` in the paper. Write the training loop as
    for one process; the steps of `inner_optimizer` are counted. All ranks take the same number of steps: not with a
    GradScaler, which skips those of single ranks.

    Between two averages each rank has a model of its own. An evaluation of `model` there is of that rank's, and the
    mean of the ranks' figures is that of no model. `average` gives the one model of all ranks, at any step. Call it at
    the end, too, before the model is saved, since the last step may be no multiple of `sync_every`:

        model.load_state_dict(local.average())

    With `min_workers`, and only then, the members may change: `distopt run --heal --workers node` (or `rank`) starts
    workers, each with a world of its own, and DiLoCo alone knows the others. A worker that is lost ends no other one;
    one that comes copies what the members hold, receives the next average with weight 0, and counts from then on. An
    average counts when all members that remain have it. A worker that is late by more than `grace` seconds is left out,
    moves what it has learned onto the new average, and takes part in the next one. Write the loop as

        local = DiLoCo(model, inner, outer, min_workers=1, averages=1000)
        data = batches(seed=local.worker)
        while not local.finished:
            ...
            inner.step()

    Args:
        model: the same on all ranks.
        inner_optimizer: over parameters of the model. All parameters and buffers become those of rank 0.
        outer_optimizer: over the same parameters.
        sync_every: steps from one average of a parameter to the next.
        codec: how changes are encoded: a codec, or the name of one (see `distopt.codecs`).
        fragments: parts of the model, in the order of its parameters, which are averaged in turn, at equal distances.
        fragment_sync_delay: steps between sending a fragment and applying its average; what a rank has learned of the
            fragment in these steps is lost, but for the share `fragment_update_alpha`.
        fragment_update_alpha: the share of a rank's own parameters in those with which it goes on from an average, 0 to
            1: the alpha of Streaming DiLoCo. The averages are the same.
        group: the ranks, over any backend (default: all).
        bucket_elements: bucket size in elements, see `distopt.engine.layout.plan`.
        non_finite: what to do about a change that is NaN or infinite on any rank: "raise" a GradientError on all ranks,
            or "skip" it: all ranks go back to the last average.
        min_workers: how many workers must take part in an average; with fewer, they wait.
        moments: with `min_workers`, how the inner optimizer of a worker that joins begins: "empty", or with a "copy" of
            a member's states, as of an average; learning rates and other options stay its own.
        averages: after so many averages of a fragment, training is `finished`.
        grace: with `min_workers`, seconds that an average waits for late workers, once half of them are ready.
        via_host: see `distopt.torch.DistOpt`; `min_workers` sends so anyway. In all cases, the last averages are on
            the device of the parameters, and take as much memory as these: 4 bytes for each float32.

    Attributes:
        steps: number of steps of the inner optimizer; of a worker that joins, those of the members.

    Raises:
        UsageError: an option is wrong, or a parameter is not one that codecs reduce; or `min_workers` is given without
            `distopt run --workers`, or is missing with it; or the workers train another model.
        MismatchError: the ranks train different models.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int = 30,
        codec: Codec | str = "fp32",
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        group: dist.ProcessGroup | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        non_finite: NonFinite = "raise",
        min_workers: int | None = None,
        moments: Literal["empty", "copy"] = "empty",
        averages: int | None = None,
        grace: float = 2.0,
        via_host: bool = False,
    ) -> None:
        """Collective."""
        outer = {id(tensor) for group in outer_optimizer.param_groups for tensor in group["params"]}
        plain = plain_model(model)[0]
        named = [*plain.named_parameters()]
        params = trained_parameters((name, tensor) for name, tensor in named if id(tensor) in outer)
        _check_schedule(len(params), sync_every, fragments, fragment_sync_delay)
        _check_options(fragment_update_alpha, min_workers, moments, averages)
        Engine.check_options(non_finite)
        place = place_of_workers(min_workers)
        self.steps = 0
        self._distance, self._delay = sync_every // fragments, fragment_sync_delay
        self._goal = None if averages is None else averages * fragments
        self._inner, self._outer = inner_optimizer, outer_optimizer
        self._averaged = {id(param.tensor): param for param in params}
        self._model, self._held = plain, HeldParameters(plain, params)
        self._check_optimizers()
        codec, self.device = codecs.codec_of(codec), device_of(params)
        via_host = via_host or place is not None
        self._communicator = communicator = communicator_of(group, self.device, via_host=via_host)
        others = [*(pair for pair in named if id(pair[1]) not in self._averaged), *plain.named_buffers()]
        first, sent_by = Engine(communicator), (codec, bucket_elements)
        self._fragments = [
            Fragment(part, outer_optimizer, Engine(communicator, non_finite), sent_by, fragment_update_alpha)
            for part in parts_of(params, fragments)
        ]
        with current_stream(self.device):
            first.agreement.attach([average for fragment in self._fragments for average in fragment.params])
            send_first(communicator, others)
        for fragment in self._fragments:
            fragment.move(fragment.averages, keep=False)
        self._workers: Workers | None = None
        self._handles = [inner_optimizer.register_step_post_hook(self._count)]
        if place is not None:
            facts = {
                "a model of": summary_of(params),
                "sync_every": sync_every,
                "fragments": f"{fragments} with a delay of {fragment_sync_delay} and alpha {fragment_update_alpha:g}",
                "codec": f"{codec!r}, format {codec.wire_format}",
                "averages": averages,
                "grace": grace,
                "moments": f"{moments} of {type(inner_optimizer).__name__}",
            }
            self._begin_to_join(place, facts, others, min_workers or 1, copies_moments=moments == "copy")

    def _begin_to_join(
        self,
        place: Place,
        facts: dict[str, Any],
        others: list[tuple[str, torch.Tensor]],
        least: int,
        *,
        copies_moments: bool,
    ) -> None:
        """Collective in this worker. Meet the service of workers; this one joins at its first step."""
        self._workers = Workers(
            self._fragments,
            self._outer,
            others,
            self._inner if copies_moments else None,
            facts,
            self._communicator,
            place,
            distance=self._distance,
            delay=self._delay,
            least=least,
            goal=self._goal,
        )
        self._handles.append(self._inner.register_step_pre_hook(self._join))

    def close(self) -> None:
        """Local. Stop counting the steps of the inner optimizer, and so averaging; a worker leaves the others."""
        for handle in self._handles:
            handle.remove()
        if self._workers is not None:
            self._workers.close()

    @property
    def worker(self) -> int:
        """Local. The number of this worker among those that ever joined, which seeds its data; else that of the rank.

        A worker that starts again has a new one.
        """
        return self._communicator.topology.rank if self._workers is None else self._workers.number

    @property
    def members(self) -> list[int]:
        """Local. The workers whose changes the last average is made of, on the first rank of a worker; else empty."""
        return [] if self._workers is None else [*self._workers.stats().members]

    @property
    def worker_of_checkpoint(self) -> int | None:
        """Local. The number by which a `Checkpoint` tells this worker from others; None where all ranks are one job."""
        return None if self._workers is None else self._workers.number

    @property
    @on_current_stream
    def finished(self) -> bool:
        """Collective in this worker. Whether all `averages` have been applied.

        With `min_workers`, a worker joins the others at the first call, or in its first step, and leaves when this
        returns True: when all workers that live hold the last average.
        """
        self._join()
        if self._workers is not None:
            return self._workers.finished
        return self._goal is not None and (self.steps - self._delay) // self._distance >= self._goal

    @on_current_stream
    def _join(self, *_: object) -> None:
        if self._workers is not None:
            self.steps = self._workers.join(self.steps)

    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract two of them for the cost between.

        With `min_workers`, `stats().workers` has the last average, its members, and how often workers were gone.
        """
        first, *others = (fragment.stats() for fragment in self._fragments)
        for other in others:
            first.steps += other.steps
            first.skipped += other.skipped
            first.buckets |= other.buckets
        first.workers = None if self._workers is None else self._workers.stats()
        return first

    @on_current_stream
    def average(self) -> dict[str, torch.Tensor]:
        """Collective, at the same step on all ranks. The one model of all ranks, to be evaluated or saved.

        It is the mean over the ranks of the parameters and of the buffers of floats, such as running statistics, as
        they are now: the last average plus the mean of what the ranks have changed since. Other tensors are those of
        the first rank. The mean travels as it is, not by the codec, and the outer optimizer takes no step. Where all
        ranks have the same parameters, as after a step that is a multiple of `sync_every` with one fragment and no
        delay, the result has their bits. A fragment whose average is under way counts as it is on the ranks.

        With `min_workers` it is the last average that this worker holds, with its own buffers, and the call is local.

        Nothing of the training changes: parameters, both optimizers, residuals of the codec and averages under way
        stay, and the steps that follow have the bits that they would have had.

        A script that loads the result into `model` on all ranks goes on from it. The next average of a fragment is of
        the changes since its last one, as before, which are then the mean already; an average that is under way
        replaces the fragment when it arrives. Residuals and the states of the inner optimizer stay each rank's own.

        Returns:
            A state dictionary of the model without DDP, of new tensors, equal on all ranks.

        Raises:
            UsageError: parameters of the model have been replaced.
            MismatchError: the ranks are at different steps, or their models differ.
        """
        self._held.check()
        if self._workers is not None:
            return self._last_average()
        mean: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}  # by id: a tensor may have several names
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):  # the extra state of a module
                mean[name] = tensor
                continue
            if id(tensor) not in made:
                changes = id(tensor) in self._averaged or not isinstance(tensor, torch.nn.Parameter)
                label = f"{name} after step {self.steps}"
                made[id(tensor)] = mean_of(self._communicator, tensor, label, changes=changes)
            mean[name] = made[id(tensor)]
        return mean

    def _last_average(self) -> dict[str, torch.Tensor]:
        averages = {
            id(tensor): average
            for fragment in self._fragments
            for tensor, average in zip(fragment.parameters, fragment.averages, strict=True)
        }
        states = self._model.state_dict(keep_vars=True)
        return {
            name: averages.get(id(tensor), tensor).detach().clone() if isinstance(tensor, torch.Tensor) else tensor
            for name, tensor in states.items()
        }

    @on_current_stream
    def _count(self, *_: object) -> None:
        """Collective. After a step of the inner optimizer: send or apply what is due."""
        self._check_optimizers()
        self.steps += 1
        if self._workers is not None:
            if self.steps % self._distance == 0:
                self._held.check()
            self.steps = self._workers.count(self.steps)
            return
        for fragment in self._fragments:
            fragment.send_again()
        if self.steps % self._distance == 0:
            self._held.check()
            self._fragment_of(self.steps).send()
        if self.steps > self._delay and (self.steps - self._delay) % self._distance == 0:
            self._fragment_of(self.steps - self._delay).apply()

    def _check_optimizers(self) -> None:
        """Local. Scripts replace and convert parameters."""
        tensors = [tensor for group in self._inner.param_groups for tensor in group["params"] if tensor.requires_grad]
        if others := sum(id(tensor) not in self._averaged for tensor in tensors):
            raise UsageError(
                f"inner_optimizer trains {others} parameters that are not averaged; make a DiLoCo for them"
            )
        outer = {id(tensor) for group in self._outer.param_groups for tensor in group["params"]}
        for key, param in self._averaged.items():
            if key not in outer:
                raise UsageError(
                    f"outer_optimizer has lost parameter {param.name}; make a new DiLoCo after such a change"
                )
            param.check_unconverted()

    def _fragment_of(self, step: int) -> Fragment:
        return self._fragments[(step // self._distance - 1) % len(self._fragments)]

    def state_dict(self) -> dict[str, Any]:
        """Local. All that a later run needs, besides the model of this rank and the inner optimizer."""
        fragments = [fragment.state_dict() for fragment in self._fragments]
        states = {"steps": self.steps, "outer": self._outer.state_dict(), "fragments": fragments}
        return states if self._workers is None else {**states, "average": self._workers.average}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. Resume from the result of `state_dict` on the same rank of a job of the same size.

        Raises:
            StateError: the states do not fit.
            UsageError: an average is under way.
        """
        fragments = state_dict.get("fragments", ())
        if len(fragments) != (count := len(self._fragments)):
            raise StateError(f"the states are of {len(fragments)} fragments, not {count}; resume with as many")
        if any(fragment._step is not None for fragment in self._fragments):
            raise UsageError(f"an average is under way in step {self.steps}; load states into a new DiLoCo")
        for fragment, states in zip(self._fragments, fragments, strict=True):
            fragment.load_state_dict(states)
        self._outer.load_state_dict(state_dict["outer"])
        self.steps = int(state_dict["steps"])
        if self._workers is not None:
            self._workers.resume(int(state_dict["average"]))


def _check_schedule(n_params: int, sync_every: int, fragments: int, delay: int) -> None:
    check_integer("fragments", fragments, 1)
    check_integer("sync_every", sync_every, 1)
    if sync_every % fragments or fragments > n_params:
        raise UsageError(
            f"{fragments} fragments of {n_params} parameters cannot be averaged at equal distances every "
            f"{sync_every} steps; choose a divisor of sync_every that is not larger than the number of parameters"
        )
    check_integer("fragment_sync_delay", delay, 0, sync_every // fragments)


def _check_options(alpha: float, min_workers: int | None, moments: str, averages: int | None) -> None:
    check_number("fragment_update_alpha", alpha, "[0, 1]")
    check_integer("min_workers", 1 if min_workers is None else min_workers, 1)
    check_integer("averages", 1 if averages is None else averages, 1)
    if moments not in ("empty", "copy"):
        raise UsageError(f'moments={moments!r} is not known; give "empty" or "copy"')
