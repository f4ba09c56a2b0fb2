"""GPUs of the emulated driver for a PyTorch of CPUs: `device="cuda"`, its streams, and autograd's threads for it.

The Python code of `torch.cuda` is PyTorch's own; some functions that it calls are replaced here.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

from . import activate, build

N_DEVICES = 8


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, *, stream: Any = None) -> None:
        import torch

        self.stream = stream or torch.Stream(torch.device("cuda", _index(device)))

    @property
    def cuda_stream(self) -> int:
        return self.stream.native_handle or 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def current_stream(device: Any = None) -> Stream:
    import torch

    return Stream(stream=torch.accelerator.current_stream(torch.device("cuda", _index(device))))


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    with chosen.stream:
        yield


def clone(storage: Any) -> Any:
    """As `UntypedStorage.clone`, by which tensors are copied deeply: a PyTorch of CPUs makes storages there alone."""
    import torch

    seen = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return seen.clone().untyped_storage()


def activate_for_torch() -> None:
    """As `activate`, before the process imports PyTorch, which looks once for what there is."""
    if "torch" in sys.modules:
        raise RuntimeError("this process has imported PyTorch already; activate before")
    activate()
    library = ctypes.CDLL(str(build.torch_gpu()))
    import _emulation as emulated
    import torch

    allocate, free = library.emulated_torch_allocate, library.emulated_torch_free
    allocate.argtypes, allocate.restype = (ctypes.c_size_t, ctypes.c_void_p), ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None

    def exchange_device(device: int) -> int:
        before = emulated.get_device()
        if device >= 0:
            emulated.set_device(device)
        return int(before)

    bindings, cuda = torch._C, torch.cuda
    # Functions of Python: PyTorch's compiler keeps those of its modules in a dictionary, where no others can be.
    bindings._cuda_getDevice = lambda: int(emulated.get_device())
    bindings._cuda_synchronize = lambda: emulated.device_synchronize()
    cuda._initialized = True
    cuda.is_available, cuda.device_count = lambda: True, lambda: N_DEVICES
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda._exchange_device = cuda._maybe_exchange_device = exchange_device
    cuda.Stream, cuda.stream, cuda.current_stream = Stream, stream, current_stream
    cuda.caching_allocator_alloc = lambda size, device=None, stream=0: allocate(size, stream)
    cuda.caching_allocator_delete = lambda address: free(address)
    torch.UntypedStorage.clone = clone
    cuda.set_device = lambda device: exchange_device(_index(device))
    cuda.default_generators = tuple(torch.Generator() for _ in range(N_DEVICES))
