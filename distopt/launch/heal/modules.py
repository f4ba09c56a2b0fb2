"""The modules that a process can import in advance for ranks: those that are installed, and know nothing of a rank.

The script's own modules are left to the ranks: their values may depend on the rank, on its process or on its folder.
So is an installed module whose source contains the name of a rank's variable, such as `"RANK"`: it may read it when it
is imported. A module that imports one of these is left to the ranks with it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[2]  # it may be in the folder of its source
# They name the variables, but read none when they are imported (tests/torch/test_launch.py).
_READ_LATER = {_PACKAGE.name, "torch"}


def _folders() -> tuple[str, ...]:
    """Where installed modules are."""
    folders = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    folders += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(_PACKAGE)]
    return tuple(f"{folder}/" for folder in folders)


def installed_modules() -> list[str]:
    """Names of the modules that this process has imported and that are installed, in the order of imports."""
    known = _folders()
    specs = {name: getattr(module, "__spec__", None) for name, module in [*sys.modules.items()]}  # some lack it
    origins = {name: str(getattr(spec, "origin", None)) for name, spec in specs.items()}
    return [name for name, origin in origins.items() if origin in {"built-in", "frozen"} or origin.startswith(known)]


# -- in the process that imports them ----------------------------------------------------------------------------------
class LeftToRanksError(BaseException):
    """The ranks must import a module. No `except Exception` of another module may take it for something else."""


class Installed(MetaPathFinder):
    """The first finder of that process: refuses what is left to the ranks.

    Args:
        own: the script's folder, whose modules come before installed ones of the same name.
        variables: the names of the variables that differ between ranks.

    Attributes:
        refused: names of other modules to refuse.
    """

    def __init__(self, own: Path, variables: Collection[str]) -> None:
        self.refused: set[str] = set()
        self._own = str(own)
        self._names = re.compile(rb"""["'](%s)["']""" % "|".join(map(re.escape, sorted(variables))).encode())
        self._known = _folders()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module, as the other finders give it.

        Raises:
            LeftToRanksError: the ranks must import it.
        """
        if fullname in self.refused:
            raise LeftToRanksError(fullname)
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.origin in {"built-in", "frozen"}:
            return spec
        origin = str(spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
        if path is None:
            mine = PathFinder.find_spec(fullname, [self._own])
            is_shadowed = mine is not None and mine.loader is not None and mine.origin != spec.origin
            if is_shadowed or not f"{origin}/".startswith(self._known):
                raise LeftToRanksError(fullname)
        is_read_later = fullname.partition(".")[0] in {*_READ_LATER, *sys.stdlib_module_names}
        if not is_read_later and origin.endswith(".py") and self._names.search(Path(origin).read_bytes()):
            raise LeftToRanksError(fullname)
        return spec


def imports_of(script: Path, folder: Path) -> list[str]:
    """Names of the modules that a script, and its own modules in a folder, import at their top level.

    A module that a condition or a function imports is left out: it may never be used.
    """
    names: dict[str, None] = {}
    files, seen = [script], set[Path]()
    while files:
        file = files.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for name in _imported(file):
            own = folder.joinpath(*name.split("."))
            files += [own.with_suffix(".py"), own / "__init__.py"]
            names[name] = None
    return [*names]


def _imported(file: Path) -> Iterator[str]:
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):  # the ranks report it
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module


def script_of(program: Sequence[str]) -> tuple[Path, Path]:
    """The file that an interpreter's command runs, a script or `-m` and a module, and its modules' folder."""
    if program[1] == "-m":
        folder = Path.cwd()
        path = folder.joinpath(*program[2].split("."))
        return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")), folder
    path = Path(os.path.realpath(program[1]))
    return (path / "__main__.py", path) if path.is_dir() else (path, path.parent)
