"""Models: layers with an optimizer, a training step, and saving and loading."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import StateError, UsageError
from ..files import load_arrays, save_arrays
from ..recorder.timeline import timeline
from .core.mode import mode as process_mode
from .core.tensor import Tensor
from .devices.device import Device
from .layers.base import Layer
from .replay.graphs import StepGraphs

_FORMAT = {"format": "distopt states", "version": "1"}


class TrainingOptimizer(Protocol):
    """The interface that a model needs from its optimizer; implemented by `optim.Optimizer` and `DistOpt`."""

    def __call__(self, loss: Tensor) -> None:
        """One training step from `loss`."""

    def attach(self, params: Iterable[Tensor]) -> None:
        """Receive the model's parameters before the first step."""


def _is_on(what: str, value: bool | str) -> bool:
    """Whether a switch is on. It may be a string: SINGA's scripts give `argparse` the default "True"."""
    if isinstance(value, str) and value not in ("True", "False"):
        raise UsageError(f"{what} is True or False; got {value!r}")
    return value == "True" if isinstance(value, str) else bool(value)


def _fits(function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether `function` can be called with these arguments."""
    try:
        inspect.signature(function).bind(*inputs, **options)
    except TypeError:
        return False
    return True


def _check_inputs(inputs: object) -> None:
    if isinstance(inputs, Tensor):
        raise UsageError("compile takes a list of inputs; write compile([x])")
    if not isinstance(inputs, (list, tuple)) or not inputs or not all(isinstance(x, Tensor) for x in inputs):
        got = [type(x).__name__ for x in inputs] if isinstance(inputs, (list, tuple)) else type(inputs).__name__
        raise UsageError(f"compile takes a list of tensors, such as [tensor.from_numpy(array)]; got {got}")


class Model(Layer):
    """Base of models.

    A subclass creates its layers in `__init__`, computes its output in `forward`, and trains on one batch in
    `train_one_batch`, which calls `self.optimizer(loss)`. Calling the model calls `train_one_batch` in training mode
    and `forward` otherwise.

    A copy by `copy.deepcopy` or `pickle` has parameters and states of its own, and no optimizer.
    """

    training: bool = True
    _compiled: bool = False
    _optimizer: TrainingOptimizer | None = None
    _device: Device | None = None
    _graphs: StepGraphs | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """In training mode, run `train_one_batch` or, with `use_graph` on a GPU, replay it; otherwise, run `forward`.

        Before `compile`, run `train_one_batch` only if the arguments fit it: scripts that traverse gradients themselves
        call a model for its output.
        """
        if not self._compiled and not _fits(self.train_one_batch, inputs, options):
            return self.forward(*inputs, **options)
        process_mode.training = self.training
        try:
            if not self.training:
                return self.forward(*inputs, **options)
            if any(isinstance(x, Tensor) and 0 in x.array.shape for x in inputs):
                raise UsageError(f"{type(self).__name__} got an empty batch; leave it out, under DistOpt within join()")
            timeline.phase("forward")
            timeline.trained_on(inputs)
            graphs = self._step_graphs()
            if graphs is None:
                return self.train_one_batch(*inputs, **options)
            return graphs.run(self.train_one_batch, self.get_states, self._optimizer, inputs, options)
        except (AttributeError, TypeError):
            if mistake := self._mistake(inputs, options):
                raise UsageError(mistake) from None
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_optimizer", "_graphs")}

    def _mistake(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> str:
        """The mistake in the arguments of a call, with its cure; empty if none is known."""
        kind = type(self).__name__
        if any(isinstance(value, np.ndarray) for value in (*inputs, *options.values())):
            return f"{kind} takes tensors, got a NumPy array; make it one with tensor.from_numpy"
        if self.training and not _fits(self.train_one_batch, inputs, options):
            wanted = inspect.signature(self.train_one_batch)
            return f"{kind} is in training mode, where it takes train_one_batch{wanted}; or call eval() before"
        return ""

    def _step_graphs(self) -> StepGraphs | None:
        device = self._device if self._compiled else None
        if device is None or device.kind == "cpu" or not device.graph_enabled() or device.verbosity:
            self._graphs = None
        elif self._graphs is None or not self._graphs.fits():
            self._graphs = StepGraphs(device)
        return self._graphs

    @property
    def graph_replays(self) -> int:
        """Number of training steps replayed since graphs were last enabled or reset, or a parameter was frozen.

        0 on a CPU.
        """
        return 0 if self._graphs is None else self._graphs.replays

    def train_one_batch(self, *inputs: Any, **options: Any) -> Any:
        """One training step. The return value is for the caller: usually output and loss."""
        raise NotImplementedError(f"{type(self).__name__} has no train_one_batch")

    def compile(
        self,
        inputs: Sequence[Tensor],
        is_train: bool = True,
        use_graph: bool | str = False,
        sequential: bool | str = False,
    ) -> None:
        """Create and name all parameters, by one forward pass in evaluation mode. Collective if the optimizer is.

        Args:
            inputs: arguments of `forward`; only their shapes and dtypes matter.
            is_train: whether to be in training mode afterwards.
            use_graph: on a GPU, capture the forward and backward passes of a training step as CUDA graphs, and replay
                them; see `distopt.nn.replay.graphs`. On a CPU, this has no effect: every step runs normally. From the
                fourth step with the same kind of arguments (shapes, types and other values), the Python code of
                `train_one_batch` no longer runs. Values that it computes from anything but its arguments, parameters
                and states stay constant, and it may only compute, call `self.optimizer` with one loss, and return
                tensors. A step that cannot be captured, for example because of dropout, runs normally, and the log says
                why, once. The failed attempt runs the step's Python code one extra time, without effect on the device.
                The strings "True" and "False" are accepted, too.
            sequential: accepted for SINGA's scripts, and ignored.

        Raises:
            UsageError: the shapes of two layers do not fit; the message names the second. Or a layer with parameters is
                not found among the attributes, so that states would lack them.
        """
        graph = _is_on("use_graph", use_graph)
        _check_inputs(inputs)
        device = self._device or inputs[0].device
        for x in inputs:
            x.to_device(device)
        for path, layer in self._sublayers():
            layer.name = path.removesuffix(".") or self.name
        self.eval()
        process_mode.initialized = []
        try:
            super().__call__(*inputs)
            self._check_found(process_mode.initialized)
        finally:
            process_mode.initialized = None
        for name, param in self.get_params().items():
            param.name = name
        self._compiled = True
        self._use_graph(device, graph)
        self.train(is_train)
        self._attach()

    def _check_found(self, layers: list[Any]) -> None:
        found = {id(layer) for _, layer in self._sublayers()}
        for layer in layers:
            if id(layer) not in found and layer.get_params():
                kind, own = type(layer).__name__, type(self).__name__
                raise UsageError(
                    f"{own} uses a {kind} with parameters that is not among its attributes, nor in a list, tuple or "
                    f"dictionary there, so files would lack them; make it in {own}.__init__, as self.name = {kind}(...)"
                )

    def graph(self, mode: bool | str = True, sequential: bool | str = False) -> None:
        """Change the `use_graph` given to `compile`.

        Raises:
            UsageError: the model is not compiled.
        """
        if self._device is None or not self._compiled:
            raise UsageError(f"{type(self).__name__} is not compiled; call compile(inputs, use_graph=...) instead")
        self._use_graph(self._device, _is_on("mode", mode))

    def _use_graph(self, device: Device, wish: bool) -> None:
        device.EnableGraph(wish)
        self._device, self._graphs = device, None

    def on_device(self, device: Device) -> None:
        """Create the parameters on `device` in `compile`, or move them there if they exist."""
        self._device = device
        for tensor in self.get_states().values():
            tensor.to_device(device)

    def train(self, mode: bool = True) -> None:
        """Enter training mode: calls train, operations are recorded, dropout and batch normalization are active."""
        self.training = mode
        process_mode.training = mode

    def eval(self) -> None:
        """Enter evaluation mode."""
        self.train(False)

    # -- optimizer ---------------------------------------------------------------------------------------------------
    @property
    def optimizer(self) -> Any:
        """The optimizer, as `Any`, since only the script knows its type.

        Raises:
            UsageError: the model has none.
        """
        if self._optimizer is None:
            raise UsageError(f"{type(self).__name__} has no optimizer; call set_optimizer before training")
        if self._graphs is not None and self._graphs.observe is not None:
            observed: TrainingOptimizer = self._graphs.observe(self._optimizer)
            return observed
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: TrainingOptimizer) -> None:
        if isinstance(optimizer, type) or not (optimizer is None or hasattr(optimizer, "attach")):
            raise UsageError(f"a model trains with an optimizer, such as opt.SGD(lr=0.1); got {optimizer!r}")
        self._optimizer, self._graphs = optimizer, None
        self._attach()

    def set_optimizer(self, optimizer: TrainingOptimizer) -> None:
        """Train with `optimizer`. Collective if the optimizer is distributed and the model is compiled."""
        self.optimizer = optimizer

    def _attach(self) -> None:
        if self._compiled and self._optimizer is not None:
            for _, layer in self._sublayers():
                layer.use_optimizer(self._optimizer)
            self._optimizer.attach(self.get_params().values())

    def shared_states(self, names: Iterable[str]) -> set[str]:
        """The names of states that are equal on all ranks, so that a checkpoint saves them once.

        These are the parameters, if the optimizer says that they agree. Running statistics differ between ranks, unless
        the optimizer has steps in shards.
        """
        if not getattr(self._optimizer, "parameters_agree", False):
            return set()
        in_shards = getattr(self._optimizer, "add_statistics", None) is not None
        return (self.get_states() if in_shards else self.get_params()).keys() & names

    def unshared_states(self) -> dict[str, Tensor]:
        """The states that change elsewhere than in an update: running statistics, or all if ranks may differ."""
        if not getattr(self._optimizer, "parameters_agree", False):
            return self.get_states()
        return {path + key: value for path, layer in self._sublayers() for key, value in layer.own_states().items()}

    # -- files -------------------------------------------------------------------------------------------------------
    def save_states(self, fpath: str | os.PathLike[str], aux_states: Mapping[str, Any] | None = None) -> None:
        """Write parameters and states to a safetensors file, atomically replacing an older one.

        Args:
            fpath: file to write.
            aux_states: further arrays, tensors or numbers to save with them.

        Raises:
            UsageError: a value of `aux_states` has another type.
            OSError: from the file system; an older file is kept.
        """
        self._check_compiled()
        arrays = {f"model/{name}": tensor.to_numpy() for name, tensor in self.get_states().items()}
        for name, value in (aux_states or {}).items():
            array = value.to_numpy() if isinstance(value, Tensor) else np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise UsageError(
                    f"aux_states[{name!r}] has dtype {array.dtype}; only numbers and truth values are saved"
                )
            arrays[f"aux/{name}"] = np.array(array, order="C")
        save_arrays(fpath, arrays, _FORMAT)

    def load_states(self, fpath: str | os.PathLike[str]) -> dict[str, Tensor]:
        """Load parameters and states from a file, and return its `aux_states` as tensors on the CPU.

        Raises:
            StateError: the file is truncated, corrupt or foreign, or a name, shape or dtype differs; nothing was
                changed.
            FileNotFoundError: there is no such file.
        """
        self._check_compiled()
        arrays, _ = load_arrays(fpath, _FORMAT, "Model.save_states")
        own = {key.removeprefix("model/"): array for key, array in arrays.items() if key.startswith("model/")}
        try:
            self.set_states(own)
        except StateError as error:
            raise StateError(f"{fpath}: {error}") from None
        return {key.removeprefix("aux/"): Tensor.of(array) for key, array in arrays.items() if key.startswith("aux/")}

    def _check_compiled(self) -> None:
        if not self._compiled:
            raise UsageError(f"{type(self).__name__} has no parameters yet; call compile before saving or loading")
