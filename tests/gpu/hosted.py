"""The kernels of `nn.numerics.gpu` for NumPy arrays, so that the tests of `nn.numerics.cpu` serve for both."""

from typing import Any

import cupy
import numpy as np

from distopt.nn.numerics import gpu


def to_device(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(to_device, value))
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def copy_back(value: Any, on_device: Any) -> None:
    if type(value) in (list, tuple):
        for pair in zip(value, on_device, strict=True):
            copy_back(*pair)
    elif isinstance(value, np.ndarray):
        value[...] = on_device.get()


def to_host(value: Any) -> Any:
    """Arrays that a function returned; `saved`, a tuple of a class of its own, stays as it is."""
    if isinstance(value, cupy.ndarray):
        return value.get()
    return tuple(map(to_host, value)) if type(value) is tuple else value


class Hosted:
    """Every function of `numerics.gpu`. NumPy arguments are copied there and back, as functions may change them."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(gpu, name)

        def call(*args: Any, **options: Any) -> Any:
            given = [to_device(value) for value in args]
            on_device = {key: to_device(value) for key, value in options.items()}
            result = to_host(function(*given, **on_device))
            copy_back(list(args), given)
            return result

        return call


hosted = Hosted()
