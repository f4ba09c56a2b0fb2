"""DiLoCo: ranks train on their own for some steps, then average what has changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1.
The model in fragments, which are sent in turn and arrive later: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, section 2. A sparse codec with error feedback sends the largest changes, an idea of
SparseLoCo (Sarfi et al., arXiv 2508.15706), which besides quantizes the values, selects in chunks, and lets what was
not sent decay; none of these is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import codecs
from ...checks import check_integer
from ...codecs import Codec, CommunicationStatistics
from ...engine.engine import DEFAULT_BUCKET_ELEMENTS, Engine, NonFinite
from ...errors import StateError, UsageError
from ..ddp.plain_model import plain_model
from .averaging import Averaging
from .communicator import communicator_of
from .gpu import current_stream, on_current_stream
from .parameters import (
    HeldParameters,
    TrainedParameter,
    device_of,
    mean_of,
    send_first,
    trained_parameters,
    views_of,
)


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

    Args:
        model: the same on all ranks.
        inner_optimizer: over parameters of the model. All parameters and buffers become those of rank 0.
        outer_optimizer: over the same parameters.
        sync_every: steps from one average of a parameter to the next.
        codec: how changes are encoded: a codec, or the name of one (see `distopt.codecs`).
        fragments: parts of the model, in the order of its parameters, which are averaged in turn, at equal distances.
        fragment_sync_delay: steps between sending a fragment and applying its average; what a rank has learned of the
            fragment in these steps is lost.
        group: the ranks, over any backend (default: all).
        bucket_elements: bucket size in elements, see `distopt.engine.layout.plan`.
        non_finite: what to do about a change that is NaN or infinite on any rank: "raise" a GradientError on all ranks,
            or "skip" it: all ranks go back to the last average.

    Attributes:
        steps: number of steps of the inner optimizer.

    Raises:
        UsageError: an option is wrong, or a parameter is not one that codecs reduce.
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
        group: dist.ProcessGroup | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        non_finite: NonFinite = "raise",
    ) -> None:
        """Collective."""
        check_integer("fragments", fragments, 1)
        check_integer("sync_every", sync_every, 1)
        outer = {id(tensor) for group in outer_optimizer.param_groups for tensor in group["params"]}
        plain = plain_model(model)[0]
        named = [*plain.named_parameters()]
        params = trained_parameters((name, tensor) for name, tensor in named if id(tensor) in outer)
        if sync_every % fragments or fragments > len(params):
            raise UsageError(
                f"{fragments} fragments of {len(params)} parameters cannot be averaged at equal distances every "
                f"{sync_every} steps; choose a divisor of sync_every that is not larger than the number of parameters"
            )
        self._distance = sync_every // fragments
        check_integer("fragment_sync_delay", fragment_sync_delay, 0, self._distance)
        Engine.check_options(non_finite)
        self.steps = 0
        self._delay, self._inner, self._outer = fragment_sync_delay, inner_optimizer, outer_optimizer
        self._averaged = {id(param.tensor): param for param in params}
        self._model, self._held = plain, HeldParameters(plain, params)
        self._check_optimizers()
        device = device_of(params)
        codec, communicator = codecs.codec_of(codec), communicator_of(group, device)
        self._communicator, self.device = communicator, device
        with current_stream(device):
            Engine(communicator).agreement.attach(params)
            others = [pair for pair in named if id(pair[1]) not in self._averaged]
            send_first(communicator, [*others, *plain.named_buffers()])
        self._fragments = [
            _Fragment(part, outer_optimizer, Engine(communicator, non_finite), (codec, bucket_elements))
            for part in _parts_of(params, fragments)
        ]
        self._handle = inner_optimizer.register_step_post_hook(self._count)

    def close(self) -> None:
        """Local. Stop counting the steps of the inner optimizer, and so averaging."""
        self._handle.remove()

    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract two of them for the cost between."""
        first, *others = (fragment.stats() for fragment in self._fragments)
        for other in others:
            first.steps += other.steps
            first.skipped += other.skipped
            first.buckets |= other.buckets
        return first

    @on_current_stream
    def average(self) -> dict[str, torch.Tensor]:
        """Collective, at the same step on all ranks. The one model of all ranks, to be evaluated or saved.

        It is the mean over the ranks of the parameters and of the buffers of floats, such as running statistics, as
        they are now: the last average plus the mean of what the ranks have changed since. Other tensors are those of
        the first rank. The mean travels as it is, not by the codec, and the outer optimizer takes no step. Where all
        ranks have the same parameters, as after a step that is a multiple of `sync_every` with one fragment and no
        delay, the result has their bits. A fragment whose average is under way counts as it is on the ranks.

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

    def _count(self, *_: object) -> None:
        """Collective. After a step of the inner optimizer: send or apply what is due."""
        self._check_optimizers()
        self.steps += 1
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

    def _fragment_of(self, step: int) -> _Fragment:
        return self._fragments[(step // self._distance - 1) % len(self._fragments)]

    def state_dict(self) -> dict[str, Any]:
        """Local. All that a later run needs, besides the model of this rank and the inner optimizer."""
        fragments = [fragment.state_dict() for fragment in self._fragments]
        return {"steps": self.steps, "outer": self._outer.state_dict(), "fragments": fragments}

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


class _Fragment(Averaging):
    """Some parameters of the model. The engine compares their last averages, which are equal on all ranks."""

    def __init__(
        self, params: list[TrainedParameter], outer: torch.optim.Optimizer, engine: Engine, sent_by: tuple[Codec, int]
    ) -> None:
        """Local. `sent_by`: a codec, and the elements of a bucket."""
        # Each parameter with its last average.
        self._pairs = [
            (param.tensor, TrainedParameter(param.name, torch.nn.Parameter(param.tensor.detach().clone(), False)))
            for param in params
        ]
        super().__init__([average for _, average in self._pairs], engine, *sent_by, optimizer=outer)
        self._outer = outer
        self._sent: list[torch.Tensor] = []  # the changes under way, and the states before they were sent
        self._before: dict[str, Any] = {}

    def _order(self) -> list[TrainedParameter]:
        return self._params

    @on_current_stream
    def send(self) -> None:
        """Collective. Encode the changes since the last average, and start to send them."""
        self._sent = [average.tensor.detach() - tensor.detach() for tensor, average in self._pairs]
        self._before = super().state_dict()
        self.send_again()

    @on_current_stream
    def send_again(self) -> None:
        """Collective. Send the changes that were under way when the states were saved."""
        if not self._sent or self._step is not None:
            return
        step = self._step = self._begun()
        views = views_of(step.layout)
        with step:
            for average, change in zip(self._params, self._sent, strict=True):
                views[id(average)].copy_(change)
                step.final(average)

    @on_current_stream
    def apply(self) -> None:
        """Collective. Wait for the mean of the changes, and take an outer step from the last average."""
        step, self._step, self._sent, self._before = self._step, None, [], {}
        assert step is not None
        with step:
            verdict = self._verdict(step)
        if verdict is not None:
            self._engine.refuse(verdict)
        with torch.no_grad():
            for tensor, average in self._pairs:
                tensor.copy_(average.tensor)
            if verdict is not None:
                return
            tensors = [tensor for group in self._outer.param_groups for tensor in group["params"]]
            views, grads = views_of(step.layout), [tensor.grad for tensor in tensors]
            for tensor in tensors:  # the step changes only those with a gradient
                tensor.grad = None
            for tensor, average in self._pairs:
                tensor.grad = views[id(average)]
            self._outer.step()
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad
            for tensor, average in self._pairs:
                average.tensor.copy_(tensor)

    @on_current_stream
    def state_dict(self) -> dict[str, Any]:
        """Local. See `DiLoCo.state_dict`; while an average is under way, the changes that were sent, too."""
        engine = self._before if self._sent else super().state_dict()
        averages = {average.name: average.tensor.detach().clone() for average in self._params}
        return {**engine, "averages": averages, "sent": list(self._sent)}

    @on_current_stream
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. See `DiLoCo.load_state_dict`; the next step sends changes that were under way again."""
        averages = state_dict.get("averages", {})
        if averages.keys() != {average.name for average in self._params}:
            raise StateError("the states are of other parameters; resume with the same model and fragments")
        super().load_state_dict(state_dict)
        for average in self._params:
            average.tensor.detach().copy_(averages[average.name])
        self._sent, self._before = [change.clone() for change in state_dict["sent"]], super().state_dict()


def _parts_of(params: list[TrainedParameter], count: int) -> list[list[TrainedParameter]]:
    """`params` cut into `count` runs of about as many elements, none of them empty."""
    ends = np.cumsum([param.tensor.numel() for param in params])
    cuts = [0]
    for k in range(1, count):
        nearest = int(np.argmin(abs(ends - ends[-1] * k / count))) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(params) - count + k))
    return [params[start:end] for start, end in zip(cuts, [*cuts[1:], len(params)], strict=True)]
