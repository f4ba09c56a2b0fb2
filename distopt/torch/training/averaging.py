"""The base of all that averages through the engine: its parameters, steps, states and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from ...codecs import BadGradient, Codec, CommunicationStatistics
from ...engine.engine import Engine, NonFinite
from ...engine.step import GradientCounter
from ...errors import UsageError
from .communicator import communicator_of
from .gpu import on_current_stream
from .parameters import Rule, TrainedParameter, arrays_in, device_of, tensors_of, views_of
from .shards import ModelShards


class Averaging:
    """Averages gradients of `params`, which are on one device, by an engine, maybe one with shards.

    Subclasses bring the gradients, and take the means. `optimizer` is the one that applies these, if it is known.
    """

    def __init__(
        self,
        params: list[TrainedParameter],
        engine: Engine,
        codec: Codec,
        bucket_elements: int,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Local."""
        self.codec, self.bucket_elements, self.device = codec, bucket_elements, params[0].tensor.device
        self._params, self._engine, self._rule = params, engine, Rule(engine.statistics, optimizer)
        self._step: GradientCounter | None = None  # the step that is open
        self._shards = cut = cast("ModelShards | None", engine.shards)
        # The action in a shard if a parameter has no gradient; see `GradientCounter.finish`.
        self._unused: Literal["raise", "zero"] = "raise" if cut is None else cut.unused

    def _begun(self) -> GradientCounter:
        """Collective. Open a step, or return the one that awaits the next shard; see `Engine.begin`."""
        return self._engine.begin(self.codec, self.bucket_elements, self._order, self._rule)

    def _order(self) -> list[TrainedParameter]:
        """Local. The parameters in the order in which their gradients usually become final."""
        return self._params[::-1]

    def _verdict(self, step: GradientCounter, unused: Literal["raise", "zero"] = "raise") -> BadGradient | None:
        """Collective, in the body of `with step`. Wait for the means in the views of the step's layout.

        Returns:
            The verdict on the gradients. If they are bad, the means are NaN, so that a GradScaler finds the same on all
            ranks.
        """
        verdict = step.finish(unused)
        if verdict is not None:
            for view in views_of(step.layout).values():
                view.fill_(torch.nan)
        return verdict

    @property
    def is_in_shards(self) -> bool:
        """Local. Whether steps are cut into shards, so that no state depends on the rank."""
        return self._shards is not None

    def shards(self, *batch: Any) -> Iterator[Any]:
        """Collective with the backward passes in it. The parts of this rank's batch, one for each of its shards.

            for x, y in loader:  # batch_sampler=ResumableSampler(..., shards=8)
                for x_part, y_part in optimizer.shards(x, y):
                    loss_of(model(x_part), y_part).backward()
                optimizer.step()

        Each turn computes the gradients of one loss, the mean over its part; the last turn on each rank averages those
        of all shards. `.grad` begins empty. In a turn, PyTorch's generator of the CPU begins with seed, step and shard,
        whatever was drawn before; afterwards it is as it was before the loop. Running statistics take in the batches at
        the end of the step. In DDP, all turns but the last run inside its `no_sync`.

        Args:
            batch: tensors, arrays or lists, cut along their first axis into equal parts; of one, the parts come alone,
                of several as tuples.

        Raises:
            UsageError: there are no shards, the batch cannot be cut equally, or a turn has no backward pass.
        """
        if (cut := self._shards) is None:
            raise UsageError(
                "shards() cuts steps for DistOpt(..., shards=8) or hook(ddp, shards=8), and this one has no shards"
            )
        return cut.parts(batch, self._engine.statistics, self._params, self._begun, self._unused)

    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract two of them for the cost between."""
        return self._engine.stats()

    @on_current_stream
    def state_dict(self) -> dict[str, Any]:
        """Local. `engine`: copies of all that a later run needs, with residuals, which differ between ranks."""
        return {"engine": tensors_of(self._engine.get_states(), self._params)}

    @on_current_stream
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. Resume from the result of `state_dict` on the same rank of a job of the same size.

        Raises:
            StateError: the states do not fit; nothing was changed.
        """
        self._engine.set_states(arrays_in(state_dict, self._params))


def engine_of(
    params: list[TrainedParameter],
    group: dist.ProcessGroup | None,
    non_finite: NonFinite,
    check_every: int = 0,
    *,
    shards: int | None,
    seed: int,
    model: torch.nn.Module | None,
    via_host: bool = False,
) -> Engine:
    """Collective. An engine for parameters of `model`, which only `shards` need; see `Engine` and `ModelShards`.

    With `via_host` it sends by the CPUs' transport, wherever the parameters are.

    Raises:
        UsageError: parameters are on several devices; or there are `shards`, and the device is not a CPU.
    """
    device = device_of(params)
    if shards is not None and device.type != "cpu":
        raise UsageError(
            f"shards={shards}: steps in shards run on CPUs, and the parameters are on {device}; leave shards= out, or "
            "train on the CPU"
        )
    communicator = communicator_of(group, device, via_host=via_host)
    cut = None if shards is None or model is None else ModelShards(shards, seed, communicator.topology, model)
    return Engine(communicator, non_finite, check_every, cut)
