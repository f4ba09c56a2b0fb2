"""The calls of NVRTC that distopt makes through CuPy. The C++ compiler compiles the sources, for the emulator."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from tests.emulation.build import compile_kernels

_KNOWN = re.compile(r"--std=c\+\+17|--fmad=false|--device-as-default-execution-space|-arch=sm_\d+")

_ENTRY = """
extern "C" __attribute__((visibility("default"))) int {name}(const emulation::Launch* launch) {{
  return emulation::enter(&{expression}, *launch);
}}
"""


class NVRTCError(RuntimeError):
    """As CuPy's."""


class _Program:
    def __init__(self, source: str, name: str, headers: dict[str, bytes]) -> None:
        self.source, self.headers = f'#line 1 "{name}"\n{source}', headers
        self.expressions: list[str] = []
        self.library: Path | None = None
        self.log = ""


_programs: dict[int, _Program] = {}


def getVersion() -> tuple[int, int]:  # noqa: N802
    return 13, 0


def createProgram(src: str, name: str, headers: list[bytes], include_names: list[bytes]) -> int:  # noqa: N802
    program = _Program(src, name, dict(zip(map(os.fsdecode, include_names), headers, strict=True)))
    _programs[id(program)] = program
    return id(program)


def destroyProgram(prog: int) -> None:  # noqa: N802
    del _programs[prog]


def addNameExpression(prog: int, name: str) -> None:  # noqa: N802
    _programs[prog].expressions.append(name)


def getLoweredName(prog: int, name: str) -> str:  # noqa: N802
    return f"entry_{_programs[prog].expressions.index(name)}"


def getProgramLog(prog: int) -> str:  # noqa: N802
    return _programs[prog].log + "\0"


def getCUBIN(prog: int) -> bytes:  # noqa: N802
    """The path of a library with the kernels."""
    return os.fsencode(str(_programs[prog].library))


def compileProgram(prog: int, options: tuple[str, ...]) -> None:  # noqa: N802
    """Compile the kernels, once for all processes."""
    program = _programs[prog]
    unknown = [option for option in options if not _KNOWN.fullmatch(option)]
    if unknown:
        program.log = f"the stand-in knows no {unknown}"
        raise NVRTCError("NVRTC_ERROR_INVALID_OPTION (5)")
    entries = (_ENTRY.format(name=f"entry_{i}", expression=name) for i, name in enumerate(program.expressions))
    text = "#include <emulation/entry.h>\n" + program.source + "".join(entries)
    name = hashlib.sha256(repr((text, program.headers)).encode()).hexdigest()
    program.library = Path(os.environ["CUPY_CACHE_DIR"], f"{name}.so")
    program.log = compile_kernels(text, program.headers, program.library)
    if program.log:
        raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
