"""Settings that come from the environment, read in one place.

| variable | default | meaning |
| --- | --- | --- |
| `DISTOPT_TIMEOUT` | 120 | seconds after which a collective with an absent peer raises |
| `DISTOPT_STALL_WARNING` | 10 | seconds after which such a collective, or `distopt run` without all nodes, warns |
| `DISTOPT_TRANSPORT` | auto | `auto`, or a name of `distopt.comm.TRANSPORTS` |
| `DISTOPT_SUM_ORDER` | auto | `rank`: every sum in rank order, even where another order is faster; or `auto` |
| `DISTOPT_DEVICE` | auto | `cpu`, or `cuda` to make a missing GPU an error, or `auto` |
| `DISTOPT_NCCL_LIBRARY` | | path of the libnccl.so.2 to load instead of the installed wheel's |
| `DISTOPT_PORTS` | | `FIRST-LAST`: the only TCP ports at which jobs of several hosts listen; for firewalls |
| `DISTOPT_UCX_LIBRARY` | | path of the libucp.so.0 to load instead of the installed wheel's |
| `DISTOPT_STREAMS` | 1 | connections between any two ranks over UCX, 1 to 16; equal on all ranks |
| `DISTOPT_FLIGHT_RECORDS` | 256 | operations that each rank keeps for the flight record; 0: none |
| `DISTOPT_FLIGHT_FOLDER` | | folder of flight records (default: a new one among the temporary files) |
| `DISTOPT_HASH` | | hashes after every step, for `distopt diff`: `every`, beside checkpoints, or a folder |
| `DISTOPT_WATCH` | | set by `distopt run --watch`: count steps, samples and waits for it |
| `DISTOPT_TIMELINE` | | folder for the timeline of each rank (default: no timelines) |
| `DISTOPT_JOB_SECRET` | | any text, equal on all ranks: keeps others out where ranks meet without mpiexec |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches

from .errors import UsageError

_MOST_STREAMS, _MOST_RECORDS = 16, 999_999


@dataclass(frozen=True)
class Settings:
    """Values of the `DISTOPT_*` variables; times in seconds."""

    timeout: float = 120.0
    stall_warning: float = 10.0
    transport: str = "auto"
    sum_order: str = "auto"
    device: str = "auto"
    nccl_library: str | None = None
    ports: range | None = None
    streams: int = 1
    flight_records: int = 256
    flight_folder: str | None = None
    hash: str | None = None
    timeline: str | None = None
    ucx_library: str | None = None
    watch: bool = False
    job_secret: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the variables of `env` (default: the process environment).

        Raises:
            UsageError: a value cannot be used, or a name is nearly that of a variable; the message names it.
        """
        env = os.environ if env is None else env
        _check_names(env)
        return cls(
            timeout=_seconds(env, "DISTOPT_TIMEOUT", cls.timeout),
            stall_warning=_seconds(env, "DISTOPT_STALL_WARNING", cls.stall_warning),
            transport=env.get("DISTOPT_TRANSPORT") or cls.transport,
            sum_order=_choice(env, "DISTOPT_SUM_ORDER", ("auto", "rank")),
            device=_choice(env, "DISTOPT_DEVICE", ("auto", "cpu", "cuda")),
            nccl_library=env.get("DISTOPT_NCCL_LIBRARY") or None,
            ports=_ports(env, "DISTOPT_PORTS"),
            streams=_count(env, "DISTOPT_STREAMS", "1", 1, _MOST_STREAMS),
            flight_records=_count(
                env, "DISTOPT_FLIGHT_RECORDS", env.get("TORCH_FR_BUFFER_SIZE", "256"), 0, _MOST_RECORDS
            ),
            flight_folder=env.get("DISTOPT_FLIGHT_FOLDER") or None,
            hash=env.get("DISTOPT_HASH") or None,
            timeline=env.get("DISTOPT_TIMELINE") or None,
            ucx_library=env.get("DISTOPT_UCX_LIBRARY") or None,
            watch=env.get("DISTOPT_WATCH", "") == "1",
            job_secret=env.get("DISTOPT_JOB_SECRET", ""),
        )


# The variables above, and others that are read where they are used; all begin with DISTOPT_.
_NAMES = [each.name.upper() for each in fields(Settings)] + [
    "AS_GLOO",
    "BACKEND",
    "DATA_DIR",
    "SUPERVISOR",
    "RUN_ID",
    "SANITIZE",
]


def _check_names(env: Mapping[str, str]) -> None:
    for name in env:
        own = name.removeprefix("DISTOPT_")
        if own != name and own not in _NAMES and (near := get_close_matches(own.upper(), _NAMES, 1, 0.75)):
            raise UsageError(f"no variable is named {name}; did you mean DISTOPT_{near[0]}?")


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = env.get(name, choices[0])
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(choices)}")
    return value


def _count(env: Mapping[str, str], name: str, default: str, least: int, most: int) -> int:
    text = env.get(name, default)
    if not (text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise UsageError(f"{name}={text!r} is not a number from {least} to {most}")
    return int(text)


def _ports(env: Mapping[str, str], name: str) -> range | None:
    if not (text := env.get(name, "")):
        return None
    numbers = [int(part) for part in text.split("-") if part.isascii() and part.isdigit() and len(part) <= 5]
    if len(numbers) != 2 or text.count("-") != 1 or not 0 < numbers[0] <= numbers[1] < 1 << 16:
        raise UsageError(f"{name}={text!r} is not a range of TCP ports, such as 24000-24099")
    return range(numbers[0], numbers[1] + 1)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:  # NaN fails too
        raise UsageError(f"{name}={text!r} is not a positive number of seconds")
    return value
