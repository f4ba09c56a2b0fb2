"""The content of a checkpoint, object by object: arrays, and notes, which are JSON values."""

from __future__ import annotations

import json
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ..checks import check_arrays
from ..errors import StateError, UsageError
from ..kernels import check_unmasked, kernels_of

if TYPE_CHECKING:
    from ..files import Arrays
    from ..launch.job.topology import Topology


__all__ = [
    "Adapter",
    "Ranks",
    "Snapshot",
    "State",
    "adapters_of",
    "check_some",
    "copy_of",
    "exchanged",
    "of_device",
    "on_host",
    "snapshot_of",
]

# Keys of notes on the arrays: on dictionaries of arrays, with their keys, and on NumPy's scalars.
_GROUPS, _SCALARS = "", "()"
LABEL = "checkpoint"  # of collectives, in messages


class Ranks(Protocol):
    """The ranks of a job, as checkpoints need them. Communicators satisfy this protocol."""

    topology: Topology

    def all_gather_bytes(self, payload: bytes, *, label: str = ...) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ. The label is for messages."""


def exchanged(ranks: Ranks, value: Any) -> list[Any]:
    """Collective. The value of JSON of every rank, in rank order."""
    return [json.loads(each) for each in ranks.all_gather_bytes(json.dumps(value).encode(), label=LABEL)]


class State(NamedTuple):
    """The state of one object on one rank: arrays and values of JSON, by names of the object's own."""

    arrays: Arrays
    notes: dict[str, Any]


class Adapter(ABC):
    """Gives and takes the state of one object for a checkpoint. All methods are local.

    Attributes:
        random: whether it is a random generator, whose states have no mean.
        copies: whether the arrays that `snapshot` gives are copies, in NumPy arrays.
    """

    random: ClassVar[bool] = False
    copies: bool = False

    @abstractmethod
    def snapshot(self) -> State:
        """The state: arrays of NumPy or CuPy, which training changes unless `copies` is set."""

    @abstractmethod
    def check(self, state: State) -> None:
        """Check that `put` would accept `state`.

        Raises:
            StateError: it does not fit.
        """

    @abstractmethod
    def put(self, state: State) -> None:
        """Resume from `state`, which `check` has accepted."""

    def shared(self, names: Iterable[str]) -> set[str]:
        """The subset of `names` whose arrays are the same on all ranks."""
        return set()

    def own(self) -> State:
        """The rank's own part of the state: all but the shared arrays and, where there are some, the notes. Cheap.

        Shared arrays that change elsewhere than in an optimizer's update are a part of it, too.
        """
        state = self.snapshot()
        same = self.shared(state.arrays)
        return State({key: array for key, array in state.arrays.items() if key not in same}, {}) if same else state

    def live(self) -> State:
        """As `snapshot`, from another thread than the one that trains, while that waits; never collective."""
        return self.snapshot()

    def widened(self, state: State) -> Arrays:
        """The arrays of `state` with floating-point numbers, in float64, for a mean over ranks."""
        return {key: array.astype(np.float64) for key, array in state.arrays.items() if array.dtype.kind == "f"}

    def narrowed(self, key: str, numbers: np.ndarray[Any, Any], state: State) -> np.ndarray[Any, Any]:
        """Numbers of float64 as the array `key` of `state` has them, rounded once."""
        return numbers.astype(state.arrays[key].dtype)


class Stateful(Adapter):
    """An object with `get_states` and `set_states`, and perhaps `check_states` and `shared_states`."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self.copies = getattr(thing, "states_are_copies", False)

    def snapshot(self) -> State:
        """The result of `get_states`: arrays, and values of JSON as notes."""
        state = State({}, {})
        groups: dict[str, list[str]] = {}
        scalars: list[str] = []
        for key, value in self._states().items():
            arrays = {key: value}
            if isinstance(value, Mapping) and value and all(_array_of(item) is not None for item in value.values()):
                groups[key] = list(value)
                arrays = {f"{key}/{name}": item for name, item in value.items()}
            elif _array_of(value) is None:
                _check_note(f"{type(self._thing).__name__}.get_states()[{key!r}]", value)
                state.notes[key] = value
                continue
            state.arrays.update({name: _array_of(item) for name, item in arrays.items()})
            scalars += [name for name, item in arrays.items() if isinstance(item, np.generic)]
        state.notes.update({key: names for key, names in ((_GROUPS, groups), (_SCALARS, scalars)) if names})
        return state

    @staticmethod
    def _values(state: State) -> dict[str, Any]:
        """The values that `get_states` returned when the state was saved."""
        values = {**state.arrays, **state.notes}
        for name in values.pop(_SCALARS, ()):
            values[name] = values[name][()]
        for key, names in values.pop(_GROUPS, {}).items():
            values[key] = {name: values.pop(f"{key}/{name}") for name in names}
        return values

    def _states(self) -> Mapping[str, Any]:
        states: Mapping[str, Any] = self._thing.get_states()
        if not states:
            raise UsageError(f"a {type(self._thing).__name__} has no states yet; call compile before Checkpoint.resume")
        return states

    def own(self) -> State:
        """The result of `unshared_states`, where the object has that method; else what `shared_states` leaves."""
        if (unshared := getattr(self._thing, "unshared_states", None)) is None:
            return super().own()
        return State({key: _array_of(value) for key, value in unshared().items()}, {})

    def check(self, state: State) -> None:
        """Call `check_states`; an object without that method accepts all states."""
        self._states()
        if hasattr(self._thing, "check_states"):
            self._thing.check_states(self._values(state))

    def put(self, state: State) -> None:
        """Call `set_states` with the values that `get_states` had given."""
        self._thing.set_states(self._values(state))

    def shared(self, names: Iterable[str]) -> set[str]:
        """The names that `shared_states` gives; none without that method."""
        return set(self._thing.shared_states(names)) if hasattr(self._thing, "shared_states") else set()


class InPlace(Adapter):
    """Tensors and arrays, by name, whose values are overwritten."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def snapshot(self) -> State:
        """The arrays themselves, without notes."""
        return State(dict(self._arrays), {})

    def check(self, state: State) -> None:
        """Check that names, shapes and dtypes are equal."""
        named = ({key or "the array": array for key, array in each.items()} for each in (self._arrays, state.arrays))
        check_arrays("script", *named)

    def put(self, state: State) -> None:
        """Overwrite the values of the arrays."""
        for key, array in self._arrays.items():
            kernels_of(array).copy_into(array, state.arrays[key])


class Random(Adapter):
    """A random generator of NumPy. Its state is one note, but for arrays in it, such as those of a Mersenne twister."""

    random = True

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def _get(self) -> dict[str, Any]:
        state: dict[str, Any] = self._generator.bit_generator.state
        return state

    def _set(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state

    def _try(self, state: dict[str, Any]) -> None:
        """Set another generator of the same kind to this state."""
        type(self._generator.bit_generator)().state = state

    def snapshot(self) -> State:
        """The generator's state."""
        state = self._get()
        arrays = {}
        for path, part in (("", state), ("state/", state["state"])):
            for key in [key for key, value in part.items() if isinstance(value, np.ndarray)]:
                arrays[path + key] = part.pop(key)
        return State(arrays, {"": state})

    @staticmethod
    def _state(state: State) -> dict[str, Any]:
        """The inverse of `snapshot`."""
        note = {**state.notes[""], "state": {**state.notes[""]["state"]}}
        for path, array in state.arrays.items():
            part, _, key = path.rpartition("/")
            (note[part] if part else note)[key] = array
        return note

    def check(self, state: State) -> None:
        """Check that the state is of a generator of the same kind."""
        own, note = self._get()["bit_generator"], state.notes.get("")
        given = note.get("bit_generator") if isinstance(note, dict) else "generator of Python"
        if given != own:
            raise StateError(f"the random generator is a {own}, that of the states a {given}")
        try:
            self._try(self._state(state))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise StateError(f"the state of the random generator cannot be used ({error})") from None

    def put(self, state: State) -> None:
        """Set the generator's state."""
        self._set(self._state(state))


class LegacyRandom(Random):
    """A `RandomState` of NumPy, or the module `numpy.random` for the global one."""

    def _get(self) -> dict[str, Any]:
        state: dict[str, Any] = self._generator.get_state(legacy=False)
        return state

    def _set(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state)

    def _try(self, state: dict[str, Any]) -> None:
        np.random.RandomState().set_state(state)


class PythonRandom(Adapter):
    """A `random.Random`, or the module `random` for the global one. Its state is an array of words, and a note."""

    random = True

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def snapshot(self) -> State:
        """The generator's state."""
        version, words, gauss = self._generator.getstate()
        return State({"": np.frombuffer(struct.pack(f"{len(words)}I", *words), np.uint32)}, {"": [version, gauss]})

    def check(self, state: State) -> None:
        """Check that a generator takes the state."""
        try:
            random.Random().setstate(self._state(state))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"the state is none of a random generator of Python ({error!r})") from None

    def put(self, state: State) -> None:
        """Set the generator's state."""
        self._generator.setstate(self._state(state))

    @staticmethod
    def _state(state: State) -> tuple[Any, ...]:
        version, *words, gauss = state.notes[""]  # older files have the words in between
        return version, tuple(words[0] if words else state.arrays[""].tolist()), gauss


class DeviceRandom(InPlace):
    """A random generator of CuPy, which keeps its state in an array on the GPU and has no public name for it."""

    random = True

    def __init__(self, generator: Any) -> None:
        super().__init__({"": generator.bit_generator._state})


def adapters_of(objects: Mapping[str, Any]) -> dict[str, Adapter]:
    """The adapters of `objects`, and of the random generators of the devices on which they are.

    Raises:
        UsageError: an object has no states that could be saved, or a name that files cannot tell from others; or
            `objects` is empty.
    """
    check_some(objects)
    for name in objects:
        if "/" in name:
            raise UsageError(f"the name {name!r} has a '/', which separates names in files; choose another")
    adapters = {name: _adapter_of(name, thing) for name, thing in objects.items()}
    devices: dict[str, Any] = {}
    for thing in objects.values():
        for value in _values_of(thing):
            if hasattr(value, "array") and hasattr(value.device, "host_rng"):
                devices.setdefault(repr(value.device), value.device)
    for index, device in enumerate(devices.values()):
        adapters[f"device{index}.host_rng"] = Random(device.host_rng)
        if device.rng is not device.host_rng:
            adapters[f"device{index}.rng"] = DeviceRandom(device.rng)
    return adapters


def check_some(objects: Mapping[str, Any]) -> None:
    """Check that there are objects: a job would seem to be saved, and resume as a new one.

    Raises:
        UsageError: there are none.
    """
    if not objects:
        raise UsageError("a checkpoint of no objects saves nothing; name them: Checkpoint(folder, model=model, ...)")


class Snapshot(NamedTuple):
    """The states of all objects of one rank, by "object/array".

    Attributes:
        shared: arrays that are the same on all ranks.
        own: the other arrays.
        notes: values of JSON, by object.
        copies: names of arrays that are copies already.
    """

    shared: Arrays
    own: Arrays
    notes: dict[str, Any]
    copies: set[str]


def snapshot_of(adapters: Mapping[str, Adapter]) -> Snapshot:
    """The states of all objects. Training changes them, except for the copies."""
    states = Snapshot({}, {}, {}, set())
    for name, adapter in adapters.items():
        state = adapter.snapshot()
        same = adapter.shared(state.arrays)
        for key, array in state.arrays.items():
            (states.shared if key in same else states.own)[f"{name}/{key}"] = array
        if adapter.copies:
            states.copies.update(f"{name}/{key}" for key in state.arrays)
        if state.notes:
            states.notes[name] = state.notes
    return states


def copy_of(array: Any) -> np.ndarray[Any, Any]:
    """A copy of an array of NumPy or CuPy, in memory of the host."""
    return np.asarray(kernels_of(array).to_host(array))


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """An array of NumPy, or a copy of one of CuPy in memory of the host."""
    return array if isinstance(array, np.ndarray) else copy_of(array)


def of_device(name: str) -> bool:
    """Whether an adapter of that name is for a device's generator. Devices of another kind have others."""
    return "." in name and name.startswith(("device", "generators.cuda"))


def generator_of(thing: Any) -> Adapter | None:
    """The adapter of a random generator of NumPy or Python; None for another object."""
    if isinstance(thing, np.random.Generator):
        return Random(thing)
    if isinstance(thing, np.random.RandomState):
        return LegacyRandom(thing)
    return PythonRandom(thing) if type(thing) is random.Random else None


def _adapter_of(name: str, thing: Any) -> Adapter:
    if isinstance(thing, Adapter):
        return thing
    if (generator := generator_of(thing)) is not None:
        return generator
    if hasattr(thing, "get_states") and hasattr(thing, "set_states"):
        return Stateful(thing)
    values = thing if isinstance(thing, Mapping) else {"": thing}
    arrays = {key: _array_of(value) for key, value in values.items()}
    # NumPy's scalars have no memory that could be overwritten.
    if not arrays or any(arrays[key] is None or isinstance(values[key], np.generic) for key in arrays):
        raise UsageError(
            f"{name} is a {type(thing).__name__}, which cannot be saved; pass an object with get_states and "
            "set_states, a tensor or array, a dictionary of them, or a random generator of NumPy or Python"
        )
    if not all(getattr(array.flags, "writeable", True) for array in arrays.values()):
        raise UsageError(f"{name} is read-only, and could not be restored; pass an array that can be overwritten")
    return InPlace(arrays)


def _check_note(name: str, value: Any) -> None:
    """Raises a UsageError if JSON would give `value` back as another type, or not at all."""
    kind = type(value)
    if kind is list:
        for i, each in enumerate(value):
            _check_note(f"{name}[{i}]", each)
    elif kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise UsageError(f"{name} has the key {key!r}, which would come back as text; make it a str")
            _check_note(f"{name}[{key!r}]", each)
    elif value is not None and kind not in (bool, int, float, str):
        raise UsageError(
            f"{name} is a {kind.__name__}, which a checkpoint cannot give back; make it a number, a str, an array, or "
            "a list or dict of such"
        )


def _values_of(thing: Any) -> Iterable[Any]:
    """The values in an object: tensors, and possibly others."""
    if hasattr(thing, "get_params"):
        thing = thing.get_params()
    return thing.values() if isinstance(thing, Mapping) else [thing]


def _array_of(value: Any) -> Any:
    """The array of NumPy or CuPy that `value` is or, as a tensor, has; None if it is something else."""
    array = getattr(value, "array", value)
    check_unmasked(array)
    if isinstance(array, np.generic):
        array = np.asarray(array)
    cupy = sys.modules.get("cupy")
    return array if isinstance(array, np.ndarray) or (cupy and isinstance(array, cupy.ndarray)) else None
