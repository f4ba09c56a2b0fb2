"""The modules that a process can import in advance for ranks."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]  # it may be in the folder of its source


def installed_modules() -> list[str]:
    """Local. Names of the modules that this process has imported and that are installed, in the order of their imports.

    The script's own modules are left out: their values may depend on the rank, on its process or on its folder.
    """
    folders = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    folders += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(_PACKAGE)]
    known = tuple(f"{folder}/" for folder in folders)
    specs = {name: getattr(module, "__spec__", None) for name, module in [*sys.modules.items()]}  # some lack it
    origins = {name: str(getattr(spec, "origin", None)) for name, spec in specs.items()}
    return [name for name, origin in origins.items() if origin in {"built-in", "frozen"} or origin.startswith(known)]
