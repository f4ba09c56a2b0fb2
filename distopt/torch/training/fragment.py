"""A part of a model whose changes are averaged: what is sent, what comes back, and the outer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...codecs import BadGradient, Codec
from ...comm import Communicator
from ...engine.engine import Engine
from ...errors import StateError
from ..private import foreach_copy
from .averaging import Averaging
from .gpu import on_current_stream
from .parameters import Rule, TrainedParameter, views_of


class Fragment(Averaging):
    """Some parameters of the model. The engine compares their last averages, which are equal on all ranks."""

    def __init__(
        self,
        params: list[TrainedParameter],
        outer: torch.optim.Optimizer,
        engine: Engine,
        sent_by: tuple[Codec, int],
        update_alpha: float = 0.0,
    ) -> None:
        """Local. `sent_by`: a codec, and the elements of a bucket; `update_alpha`: see `DiLoCo`."""
        self._alpha = update_alpha
        self._pairs = [(param.tensor, _copy_of(param)) for param in params]  # each with its last average
        super().__init__([average for _, average in self._pairs], engine, *sent_by, optimizer=outer)
        self._outer = outer
        self._sent: list[torch.Tensor] = []  # the changes under way, and the states before they were sent
        self._before: dict[str, Any] = {}

    def _order(self) -> list[TrainedParameter]:
        return self._params

    @on_current_stream
    def send(self) -> None:
        """Collective. Encode the changes since the last average, and start to send them."""
        self.note_changes()
        self.send_again()

    @on_current_stream
    def send_again(self) -> None:
        """Collective. Send the changes that were under way when the states were saved."""
        if not self._sent or self._step is not None:
            return
        step = self._step = self._begun()
        views = views_of(step.layout)
        with step:
            foreach_copy([views[id(average)] for average in self._params], self._sent)
            for average in self._params:
                step.final(average)

    @on_current_stream
    def apply(self) -> None:
        """Collective. Wait for the mean of the changes, and take an outer step from the last average."""
        means, verdict = self.finish()
        self.take(means, verdict)

    @on_current_stream
    def finish(self) -> tuple[list[torch.Tensor], BadGradient | None]:
        """Collective. Wait for the mean of the changes: views that stay until the next changes are sent.

        Returns:
            The means, one for each parameter, and the verdict on them.
        """
        step, self._step = self._step, None
        assert step is not None
        with step:
            verdict = self._verdict(step)
        views = views_of(step.layout)
        return [views[id(average)] for _, average in self._pairs], verdict

    @on_current_stream
    def take(self, means: Sequence[torch.Tensor], verdict: BadGradient | None) -> None:
        """Local. Take an outer step from the last average by these means; after a bad verdict, go back to it.

        Raises:
            GradientError: the verdict is bad, and not to be skipped.
        """
        self._sent, self._before = [], {}
        if verdict is not None:
            self._engine.refuse(verdict)
        with torch.no_grad():
            own = [tensor.clone() for tensor, _ in self._pairs] if self._alpha and verdict is None else []
            foreach_copy(self.tensors, self.averages)
            if verdict is not None:
                return
            tensors = [tensor for group in self._outer.param_groups for tensor in group["params"]]
            grads = [tensor.grad for tensor in tensors]
            for tensor in tensors:  # the step changes only those with a gradient
                tensor.grad = None
            for (tensor, _), mean in zip(self._pairs, means, strict=True):
                tensor.grad = mean
            self._outer.step()
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad
            foreach_copy(self.averages, self.tensors)
            for (tensor, _), before in zip(self._pairs, own, strict=False):
                tensor.lerp_(before, self._alpha)

    # -- members that change, see `distopt.torch.training.members` ---------------------------------------------------
    @property
    def params(self) -> list[TrainedParameter]:
        """Local. The last averages as the engine has them."""
        return self._params

    @property
    def averages(self) -> list[torch.Tensor]:
        """Local. The last averages, in the order of `tensors`."""
        return [average.tensor.detach() for _, average in self._pairs]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Local. The parameters, detached."""
        return [tensor.detach() for tensor, _ in self._pairs]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Local. The parameters themselves."""
        return [tensor for tensor, _ in self._pairs]

    @property
    def counts(self) -> list[int]:
        """Local. How many averages have been begun, and how many of them were refused."""
        return [self._engine.statistics.steps, self._engine.statistics.skipped]

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        self._engine.statistics.steps, self._engine.statistics.skipped = counts

    def note_changes(self) -> None:
        """Local. Note what has changed since the last average, to be sent by `send_through`."""
        self._sent = [average - tensor for average, tensor in zip(self.averages, self.tensors, strict=True)]
        self._before = super().state_dict()

    def withdraw(self) -> None:
        """Local. Forget what was noted, and the states of the codec after it was sent."""
        super().load_state_dict(self.own_states())
        self._sent, self._before, self._step = [], {}, None

    def return_to(self, states: Mapping[str, Any]) -> None:
        """Local. Use these states of the codec, which are earlier ones, with the counts of averages of now."""
        engine = {**states["engine"], "steps": super().state_dict()["engine"]["steps"]}
        super().load_state_dict({"engine": engine})

    def own_states(self) -> dict[str, Any]:
        """Local. The states of the codec before the changes that are under way were sent; this worker's own."""
        return self._before if self._sent else super().state_dict()

    @on_current_stream
    def move(self, averages: Sequence[torch.Tensor], *, keep: bool) -> None:
        """Local. Go on from other averages; `keep`: with the changes since the last ones."""
        with torch.no_grad():
            for (tensor, average), value in zip(self._pairs, averages, strict=True):
                change = tensor - average.tensor if keep else None
                average.tensor.copy_(value)
                tensor.copy_(value)
                if change is not None:
                    tensor += change

    @on_current_stream
    def send_through(self, communicator: Communicator, states: Mapping[str, Any], *, zero: bool) -> None:
        """Collective. Start to send the changes that were noted, or zeros, from these states of the codec."""
        if self._engine.communicator is not communicator:
            before = self._engine
            self._engine = Engine(communicator, before.non_finite)
            # All have copied them, or are about to: they are not compared.
            self._engine.agreement.attached = {id(param): param for param in self._params}
            self._engine.statistics.buckets = before.statistics.buckets
            self._rule = Rule(self._engine.statistics, self._outer)
        super().load_state_dict(states)
        if zero:
            self._sent = [torch.zeros_like(average) for average in self.averages]
        self._step = None
        self.send_again()

    @on_current_stream
    def state_dict(self) -> dict[str, Any]:
        """Local. The states of the engine and the averages; while an average is under way, the changes sent, too."""
        engine = self._before if self._sent else super().state_dict()
        averages = {average.name: average.tensor.detach().clone() for average in self._params}
        return {**engine, "averages": averages, "sent": list(self._sent)}

    @on_current_stream
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. Continue from a `state_dict`; the next step sends changes that were under way again."""
        averages = state_dict.get("averages", {})
        if averages.keys() != {average.name for average in self._params}:
            raise StateError("the states are of other parameters; resume with the same model and fragments")
        super().load_state_dict(state_dict)
        for average in self._params:
            average.tensor.detach().copy_(averages[average.name])
        self._sent, self._before = [change.clone() for change in state_dict["sent"]], super().state_dict()


def _copy_of(param: TrainedParameter) -> TrainedParameter:
    return TrainedParameter(param.name, torch.nn.Parameter(param.tensor.detach().clone(), False))


def parts_of(params: list[TrainedParameter], count: int) -> list[list[TrainedParameter]]:
    """`params` cut into `count` runs of about as many elements, none of them empty."""
    ends = np.cumsum([param.tensor.numel() for param in params])
    cuts = [0]
    for k in range(1, count):
        nearest = int(np.argmin(abs(ends - ends[-1] * k / count))) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(params) - count + k))
    return [params[start:end] for start, end in zip(cuts, [*cuts[1:], len(params)], strict=True)]
