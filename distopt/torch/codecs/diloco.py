"""DiLoCo: ranks train on their own for some steps, then average what has changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1.
The model in fragments, which are sent in turn and arrive later: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, section 2. With a sparse codec and error feedback it is SparseLoCo: Sarfi et al.,
arXiv 2508.15706.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import compress
from ...checks import check_integer
from ...errors import StateError, UsageError
from ...sync.engine import DEFAULT_BUCKET_ELEMENTS, Engine, NonFinite
from ..checkpoint.states import plain_model
from .communicator import communicator_of
from .parameters import OptimizerRule, TrainedParameter, arrays_in, tensors_of, trained_parameters, views_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from ...comm import Communicator
    from ...compress import Codec, CommunicationStatistics
    from ...sync.step import GradientCounter


class DiLoCo:
    """Trains each rank by `inner_optimizer` alone, and averages the changes over the ranks every `sync_every` steps.

    The change of a parameter since the last average, with the opposite sign, is the gradient of the outer optimizer:
    `torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)` in the paper. Write the training loop as
    for one process; the steps of `inner_optimizer` are counted. All ranks take the same number of steps.

    Args:
        model: the same on all ranks; the parameters of rank 0 replace those of all ranks.
        inner_optimizer: over parameters of the model.
        outer_optimizer: over the same parameters.
        sync_every: steps from one average of a parameter to the next.
        codec: how changes are encoded: a codec, or the name of one (see `distopt.compress`).
        fragments: parts of the model, in the order of its parameters, which are averaged in turn, at equal distances.
        fragment_sync_delay: steps between sending a fragment and applying its average; what a rank has learned of the
            fragment in these steps is lost.
        group: the ranks, over any backend for CPU tensors (default: all).
        bucket_elements: bucket size in elements, see `distopt.sync.layout.plan`.
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
        params = trained_parameters(plain_model(model)[0].named_parameters())
        if sync_every % fragments or fragments > len(params):
            raise UsageError(
                f"{fragments} fragments of {len(params)} parameters cannot be averaged at equal distances every "
                f"{sync_every} steps; choose a divisor of sync_every that is not larger than the number of parameters"
            )
        self._distance = sync_every // fragments
        if not 0 <= check_integer("fragment_sync_delay", fragment_sync_delay) < self._distance:
            raise UsageError(
                f"fragment_sync_delay={fragment_sync_delay} is not from 0 to {self._distance - 1}, where the next "
                "fragment is sent"
            )
        Engine.check_options(non_finite)
        self.steps = 0
        self._delay = fragment_sync_delay
        self._outer = outer_optimizer
        self._params = params
        codec = compress.codec_of(codec)
        communicator = communicator_of(group)
        Engine(communicator).agreement.attach(params)
        self._fragments = [
            _Fragment(part, outer_optimizer, communicator, codec, bucket_elements, non_finite)
            for part in _parts_of(params, fragments)
        ]
        self._handle = inner_optimizer.register_step_post_hook(self._count)

    def close(self) -> None:
        """Local. Count the inner optimizer's steps no more."""
        self._handle.remove()

    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract two of them for the cost between."""
        first, *others = (fragment.engine.stats() for fragment in self._fragments)
        for other in others:
            first.steps += other.steps
            first.skipped += other.skipped
            first.buckets |= other.buckets
        return first

    def _count(self, *_: object) -> None:
        """Collective. After a step of the inner optimizer: send or apply what is due."""
        self.steps += 1
        if self.steps % self._distance == 0:
            self._fragment_of(self.steps).send()
        if self.steps > self._delay and (self.steps - self._delay) % self._distance == 0:
            self._fragment_of(self.steps - self._delay).apply([param.tensor for param in self._params])

    def _fragment_of(self, step: int) -> _Fragment:
        return self._fragments[(step // self._distance - 1) % len(self._fragments)]

    def state_dict(self) -> dict[str, Any]:
        """Local. All that a later run needs, besides the model of this rank and the inner optimizer.

        Raises:
            UsageError: an average is under way.
        """
        if any(fragment.step is not None for fragment in self._fragments):
            raise UsageError(
                f"an average is under way in step {self.steps}; save {self._delay} or more steps after one is sent, "
                f"which is every {self._distance} steps"
            )
        return {
            "steps": self.steps,
            "outer": self._outer.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. Resume from the result of `state_dict` on the same rank of a job of the same size.

        Raises:
            StateError: the states do not fit.
        """
        if len(state_dict["fragments"]) != len(self._fragments):
            raise StateError(
                f"the states are of {len(state_dict['fragments'])} fragments, the model has {len(self._fragments)}; "
                "resume with the same number"
            )
        for fragment, states in zip(self._fragments, state_dict["fragments"], strict=True):
            fragment.load_state_dict(states)
        self._outer.load_state_dict(state_dict["outer"])
        self.steps = int(state_dict["steps"])


class _Fragment:
    """Some parameters of the model.

    Attributes:
        engine: averages their changes.
        step: the average that is under way.
    """

    def __init__(
        self,
        params: list[TrainedParameter],
        outer: torch.optim.Optimizer,
        communicator: Communicator,
        codec: Codec,
        bucket_elements: int,
        non_finite: NonFinite,
    ) -> None:
        self.engine = Engine(communicator, non_finite)
        self.step: GradientCounter | None = None
        self._params, self._outer = params, outer
        self._rule = OptimizerRule(outer, self.engine.statistics)
        self._codec, self._bucket_elements = codec, bucket_elements
        self._averages = [param.tensor.detach().clone() for param in params]
        # The engine compares these, which are equal on all ranks, and never the parameters of the ranks.
        self._shown = [
            TrainedParameter(param.name, torch.nn.Parameter(average, requires_grad=False))
            for param, average in zip(params, self._averages, strict=True)
        ]

    def send(self) -> None:
        """Collective. Encode the changes since the last average, and start to send them."""
        step = self.step = self.engine.begin(self._codec, self._bucket_elements, lambda: self._shown, self._rule)
        views = views_of(step.layout)
        with step, torch.no_grad():
            for shown, param, average in zip(self._shown, self._params, self._averages, strict=True):
                torch.sub(average, param.tensor, out=views[id(shown)])
                step.final(shown)

    def apply(self, tensors: list[torch.nn.Parameter]) -> None:
        """Collective. Wait for the mean of the changes, and make one step of the outer optimizer from the last average.

        Args:
            tensors: all parameters of the outer optimizer; its step changes only parameters with a gradient.
        """
        step, self.step = self.step, None
        assert step is not None
        with step:
            verdict = step.finish()
        if verdict is not None:
            self.engine.refuse(verdict)
        with torch.no_grad():
            for param, average in zip(self._params, self._averages, strict=True):
                param.tensor.copy_(average)
            if verdict is not None:
                return
            views, grads = views_of(step.layout), [tensor.grad for tensor in tensors]
            for tensor in tensors:
                tensor.grad = None
            for shown, param in zip(self._shown, self._params, strict=True):
                param.tensor.grad = views[id(shown)]
            self._outer.step()
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad
            for param, average in zip(self._params, self._averages, strict=True):
                average.copy_(param.tensor)

    def state_dict(self) -> dict[str, Any]:
        averages = {param.name: average.clone() for param, average in zip(self._params, self._averages, strict=True)}
        return {"engine": tensors_of(self.engine.get_states()), "averages": averages}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        averages = states["averages"]
        if averages.keys() != {param.name for param in self._params}:
            raise StateError("the states are of other parameters; resume with the same model and fragments")
        self.engine.set_states(arrays_in(states["engine"]))
        for param, average in zip(self._params, self._averages, strict=True):
            average.copy_(averages[param.name])


def _parts_of(params: list[TrainedParameter], count: int) -> list[list[TrainedParameter]]:
    """`params` cut into `count` runs of about as many elements, none of them empty."""
    ends = list(accumulate(param.tensor.numel() for param in params))
    cuts = [0]
    for k in range(1, count):
        nearest = int(np.argmin([abs(end - ends[-1] * k / count) for end in ends])) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(params) - count + k))
    return [params[start:end] for start, end in zip(cuts, [*cuts[1:], len(params)], strict=True)]
