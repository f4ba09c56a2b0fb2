"""The modules that a process can import in advance for ranks."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]  # it may be in the folder of its source


def installed_modules() -> list[str]:
    """Local. Names of the modules that this process has imported and that are installed, in the order of their imports.

    The script's own modules are left out: their values may depend on the rank, on its process or on its folder.
    """
    paths = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = [*paths, *map(Path, [*site.getsitepackages(), site.getusersitepackages()]), _PACKAGE]
    known = tuple(f"{folder}/" for folder in folders)
    specs = {name: getattr(module, "__spec__", None) for name, module in [*sys.modules.items()]}  # some lack it
    origins = {name: str(getattr(spec, "origin", None)) for name, spec in specs.items()}
    return [name for name, origin in origins.items() if origin in {"built-in", "frozen"} or origin.startswith(known)]
