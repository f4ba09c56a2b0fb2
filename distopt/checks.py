"""Checks of arguments, attributes and saved states, and of names that a module does not have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any, NoReturn

from .errors import StateError, UsageError


def absent_name(
    module: str, name: str, names: Iterable[str], reasons: Mapping[str, str] | None = None, otherwise: str = ""
) -> AttributeError:
    """The error that a module's `__getattr__` raises for a name that it does not have, with the cure in its one line.

    Args:
        module: `__name__` of the module.
        name: the name that was looked up.
        names: names in the module; the nearest of them is suggested.
        reasons: for names that are absent on purpose, the reason and the alternative.
        otherwise: the cure where no name is near (default: to list all names).
    """
    # Without name and obj, Python appends a second suggestion.
    return AttributeError(_AbsentName(module, name, names, reasons or {}, otherwise), name=None, obj=None)


def explain_absent(module: dict[str, Any], names: Iterable[str], reasons: Mapping[str, str] | None = None) -> None:
    """Give a module, by its `globals()`, a `__getattr__` that raises the error of `absent_name`.

    Where type checkers see the definition of a `__getattr__`, they accept every name of the module.
    """

    def refuse(name: str) -> NoReturn:
        raise absent_name(module["__name__"].replace(".singa", ""), name, names, reasons)

    module["__getattr__"] = refuse


@dataclass(frozen=True)
class _AbsentName:
    """A message that is composed when it is read: `hasattr` never does, and to find the nearest name takes long."""

    module: str
    name: str
    names: Iterable[str]
    reasons: Mapping[str, str]
    otherwise: str

    def __str__(self) -> str:
        if self.name in self.reasons:
            cure = f": {self.reasons[self.name]}"
        elif near := get_close_matches(self.name, self.names, 1):
            cure = f"; did you mean {near[0]}?"
        else:
            cure = f"; {self.otherwise or f'dir({self.module}) lists what there is'}"
        return f"{self.module} has no {self.name}{cure}"


def check_integer(name: str, value: Any, least: int | None = None, below: int | None = None) -> int:
    """The argument `name` as an int. Values with `__index__`, such as NumPy's integers, are integers; bools not.

    Raises:
        UsageError: it is not an integer, is less than `least`, or is not less than `below`, which needs `least`.
    """
    number = None
    # Until NumPy 2.3, its bools have `__index__`.
    if not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", "") != "b":
        with contextlib.suppress(TypeError):  # not an integer
            number = operator.index(value)
    if number is None or (least is not None and number < least) or (below is not None and number >= below):
        limit = "" if least is None else f" of at least {least}" if below is None else f" in {least} ... {below - 1}"
        raise UsageError(f"{name} is {value!r}; it must be an integer{limit}")
    return number


def check_number(name: str, value: Any, interval: str) -> float:
    """The argument `name` as a float. Bools are not numbers.

    Args:
        name: for the message.
        value: the argument.
        interval: where it must lie, such as "[0, 1)", where 0 is allowed and 1 is not, or "(0, inf)".

    Raises:
        UsageError: it is not a number, or lies elsewhere.
    """
    number = float(value) if type(value) is not bool and isinstance(value, Real) else math.nan  # which lies nowhere
    low, high = map(float, interval[1:-1].split(","))
    if not low <= number <= high or (number == low and interval[0] == "(") or (number == high and interval[-1] == ")"):
        raise UsageError(f"{name} is {value!r}; it must be a number in {interval}")
    return number


def check_count(name: str, value: Any) -> int:
    """The counter `name` of saved states, a number or an array or tensor of one element, as an int.

    Raises:
        StateError: it is not a whole number from 0 to 2**53; a float does not hold every integer beyond that.
    """
    number = value
    with contextlib.suppress(AttributeError, ValueError):  # a number has no `item`; there are several elements
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 2**53 or number % 1:
        raise StateError(f"the states' {name} is {value!r}; expected a whole number from 0; pass what get_states gave")
    return int(number)


def check_like(name: str, own: Any, given: Any) -> None:
    """Check that a value of saved states has the shape and the dtype of the array or tensor that it replaces.

    Raises:
        StateError: it has not; the message begins with `name`.
    """
    shape, dtype = tuple(getattr(given, "shape", ())), getattr(given, "dtype", type(given).__name__)
    if shape != own.shape or dtype != own.dtype:
        raise StateError(
            f"{name} is {own.dtype} of shape {own.shape}, that of the states {dtype} of shape {shape}; load states of "
            "the same model and script"
        )


def check_arrays(whole: str, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that saved states have one value for each of the arrays or tensors `own`, and no others.

    Args:
        whole: what these are parts of, for messages: "model", for example.
        own: by name.
        given: by name.

    Raises:
        StateError: a name is missing or unknown, or see `check_like`.
    """
    for name in (*own, *given):
        if (name in own) != (name in given):
            fact = f"{name} is missing" if name in own else f"the {whole} has no {name}"
            raise StateError(f"{fact}; the states are of another {whole}")
    for name, array in own.items():
        check_like(name, array, given[name])


@functools.cache
def names_of(cls: Any) -> frozenset[str]:
    """The names that a class and its bases define, or annotate in their bodies."""
    return frozenset(name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base)))


def check_assignment(owner: Any, name: str, wrapped: Any = None) -> None:
    """Check that something reads an attribute that is about to be assigned; for `__setattr__`.

    Only objects of distopt's own classes are checked: those that scripts derive have attributes of their own.

    Args:
        owner: the object.
        name: the attribute.
        wrapped: an inner object; `owner` passes it assignments to names of its class.

    Raises:
        UsageError: the assignment would have no effect; the message has the nearest name, or all.
    """
    cls: Any = type(owner)
    if name.startswith("_") or name in vars(owner) or name in names_of(cls) or cls.__module__[:8] != "distopt.":
        return
    inner = [] if wrapped is None else _data_of(wrapped)
    known = sorted({*_data_of(owner), *inner})
    if name in inner:
        cure = f"assign to that of the {type(wrapped).__name__} inside"
    elif near := get_close_matches(name, known, 1):
        cure = f"did you mean {near[0]}?"
    else:
        cure = f"it has {', '.join(known)}"
    raise UsageError(f"{cls.__name__} has no {name}, so an assignment would have no effect; {cure}")


def _data_of(owner: Any) -> list[str]:
    """The names of an object's public attributes, without its methods."""
    cls: Any = type(owner)
    methods = {name for base in cls.__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
    names = {*vars(owner), *names_of(cls)} - methods
    return [name for name in names if not name.startswith("_")]
