"""SINGA's `opt` module: the optimizers, and `DistOpt` with SINGA's constructor and method names.

Scripts written for SINGA run with `from singa import opt` changed to `from distopt import opt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .. import dist_opt
from ..checks import explain_absent
from ..codecs import BFloat16, Codec, ErrorFeedback, Fp16, Fp32, Threshold, TopK
from ..engine.by_hand import memory_of
from ..engine.engine import DEFAULT_BUCKET_ELEMENTS
from ..errors import UsageError
from ..nn.core.array import Array
from ..nn.core.raw import RawTensor
from ..nn.core.tensor import Tensor
from ..nn.optim import rules, schedules
from ..nn.optim.optimizer import Optimizer, check_gradient
from ..nn.optim.rules import *  # noqa: F403 - a face of these modules
from ..nn.optim.schedules import *  # noqa: F403

__all__ = ["DIST_OPTIONS", "DistOpt", "Optimizer"]
__all__ += rules.__all__
__all__ += schedules.__all__

# The values of the scripts' `dist_option`.
PARTIAL = "partialUpdate"
_DENSE: dict[str, type[Codec]] = {"plain": Fp32, "fp32": Fp32, "half": Fp16, "fp16": Fp16, "bf16": BFloat16}
DIST_OPTIONS = (*_DENSE, PARTIAL, "sparseTopK", "sparseThreshold")


class DistOpt(dist_opt.DistOpt):
    """The distributed optimizer with SINGA's methods: sums by hand, and kinds of steps."""

    @cached_property
    def _raw_params(self) -> dict[tuple[int, int, str], Tensor]:
        return {}  # by their memory

    # -- tensors, raw tensors and arrays, by hand ----------------------------------------------------------------------
    def update(self, param: Tensor | Array, grad: Tensor | Array) -> None:
        """Divide `grad`, a sum over ranks, by the world size, then let the wrapped optimizer apply it.

        Args:
            param: updated in place. The optimizer keeps states by tensor, and for a raw one by its memory, so pass
                either always the tensor or always its contents.
            grad: of the same shape and dtype; changed.

        Raises:
            UsageError: as the methods below, or `Optimizer.apply`; nothing was changed.
        """
        array = self._array(grad)
        if not isinstance(param, Tensor):
            raw = self._array(param)
            device = None if isinstance(raw, np.ndarray) else self.device
            param = self._raw_params.setdefault(memory_of(raw), Tensor.of(raw, device))
        if not isinstance(grad, Tensor):
            grad = Tensor.of(array, param.device, requires_grad=False)
        check_gradient(param, grad)
        array /= self.world_size
        self.opt.update(param, grad)

    def _array(self, tensor: Tensor | Array) -> Array:
        """The array in a tensor or raw tensor, or the array itself.

        Raises:
            UsageError: it cannot be sent or receive a result.
        """
        array = tensor.array if isinstance(tensor, Tensor) else tensor
        self.communicator.check_array(array, written=True)
        return array.view(np.ndarray) if isinstance(array, RawTensor) else array

    def all_reduce(self, tensor: Tensor | Array) -> None:
        """Collective. Sum `tensor` over the ranks, in place; valid after `wait`.

        This method and those below take tensors, raw tensors (`Tensor.data`) and arrays.

        Raises:
            UsageError: it is something else, of another type than can be sent, strided or read-only.
        """
        array = self._array(tensor)
        with self._engine.by_hand(self.opt):
            self._fusion.all_reduce(array)

    def all_reduce_half(self, tensor: Tensor | Array) -> None:
        """Collective. As `all_reduce`, with 16-bit values on the wire; float32 only."""
        with self._engine.by_hand(self.opt):
            self._fusion.send([self._array(tensor)], Fp16())

    def fused_all_reduce(self, tensor: Sequence[Tensor | Array], send: bool = True) -> None:
        """Collective. Sum small tensors over the ranks as one message.

        With `send=False` they are only staged. With `send=True`, tensors of the list `tensor` that are not staged yet
        join them, and all are summed, in place; valid after `wait`.
        """
        self._fuse(tensor, Fp32(), send)

    def fused_all_reduce_half(self, tensor: Sequence[Tensor | Array], send: bool = True) -> None:
        """Collective. As `fused_all_reduce`, with 16-bit values on the wire; float32 only."""
        self._fuse(tensor, Fp16(), send)

    def sparsification(
        self,
        tensor: Tensor | Array,
        accumulation: Tensor | Array | None = None,
        spars: float = 0.05,
        topK: bool = False,
    ) -> None:
        """Collective. Sum the largest elements of `tensor` over the ranks, in place; valid after `wait`.

        Args:
            tensor: float32.
            accumulation: the residual, of the same size and type: it is added before the selection, and receives what
                was not sent. None drops that.
            spars: with topK the share of elements to send, otherwise the least magnitude that is sent.
            topK: which of the two.
        """
        self.fused_sparsification([tensor], accumulation, spars, topK)

    def fused_sparsification(
        self,
        tensor: Sequence[Tensor | Array],
        accumulation: Tensor | Array | None = None,
        spars: float = 0.05,
        topK: bool = False,
    ) -> None:
        """Collective. As `sparsification`, with one selection from all tensors of the list `tensor` together.

        `accumulation` has as many elements as all of them.
        """
        residual = None if accumulation is None else self._array(accumulation).reshape(-1)
        with self._engine.by_hand(self.opt):
            self._fusion.send(self._arrays(tensor), _sparse_codec(spars, topK, residual is not None), residual)

    def wait(self) -> None:
        """Collective. Finish the sums that the methods above have started.

        Raises:
            GradientError: a value was NaN or infinite on some rank.
        """
        with self._engine.by_hand(self.opt):
            self._fusion.wait()

    def _fuse(self, tensors: Sequence[Tensor | Array], codec: Codec, send: bool) -> None:
        with self._engine.by_hand(self.opt):
            self._fusion.stage(self._arrays(tensors), codec)
            if send:
                self._fusion.send_staged()

    def _arrays(self, tensors: Sequence[Tensor | Array]) -> list[Array]:
        if not isinstance(tensors, (list, tuple)):
            kind = type(tensors).__name__
            raise UsageError(f"a fused sum takes a list of tensors or arrays, not an object of type {kind}")
        return [self._array(tensor) for tensor in tensors]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def backward_and_update(self, loss: Tensor, threshold: int = DEFAULT_BUCKET_ELEMENTS) -> None:
        """Collective. One step with float32 gradients on the wire."""
        self.reduce_and_update(loss, Fp32(), threshold)

    def backward_and_update_half(
        self, loss: Tensor, threshold: int = DEFAULT_BUCKET_ELEMENTS, clipping: bool = False, clip_Value: float = 100
    ) -> None:
        """Collective. One step with float16 gradients on the wire, on request clipped to +-clip_Value before."""
        self.reduce_and_update(loss, Fp16(), threshold, clip=clip_Value if clipping else None)

    def backward_and_partial_update(self, loss: Tensor, threshold: int = DEFAULT_BUCKET_ELEMENTS) -> None:
        """Collective. One step of local updates; then one partition of the parameters is averaged."""
        self.update_partially(loss, threshold)

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int = DEFAULT_BUCKET_ELEMENTS,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """Collective. One step that sends the largest gradients only.

        Args:
            loss: the loss to differentiate.
            threshold: bucket size in elements.
            spars: with topK the share of elements to send, otherwise the least magnitude that is sent.
            topK: which of the two.
            corr: add unsent gradients to the gradients of the next step (error feedback).
        """
        self.reduce_and_update(loss, _sparse_codec(spars, topK, corr), threshold)

    def step_by(self, dist_option: str, loss: Tensor, *, spars: float = 0.05, corr: bool = True) -> None:
        """Collective. One step of a kind that is chosen by name, as command-line options do.

        Args:
            dist_option: one of `DIST_OPTIONS`. It may change from step to step.
            loss: the loss to differentiate.
            spars: share of the elements (sparseTopK) or threshold (sparseThreshold).
            corr: error feedback for the sparse ones.

        Raises:
            UsageError: no option has that name.
        """
        if dist_option == PARTIAL:
            self.update_partially(loss, self.partition_elements)
        else:
            self.reduce_and_update(loss, codec_of(dist_option, spars, corr), self.bucket_elements)


def codec_of(dist_option: str, spars: float = 0.05, corr: bool = True) -> Codec:
    """The codec of a `dist_option` other than partialUpdate; see `DistOpt.step_by`.

    Raises:
        UsageError: no option has that name.
    """
    if dist_option in _DENSE:
        return _DENSE[dist_option]()
    if dist_option in ("sparseTopK", "sparseThreshold"):
        return _sparse_codec(spars, dist_option == "sparseTopK", corr)
    raise UsageError(f"unknown dist_option {dist_option!r}; choose one of {', '.join(DIST_OPTIONS)}")


def _sparse_codec(spars: float, topK: bool, corr: bool) -> Codec:
    codec = TopK(spars) if topK else Threshold(spars)
    return ErrorFeedback(codec) if corr else codec


explain_absent(globals(), __all__)
