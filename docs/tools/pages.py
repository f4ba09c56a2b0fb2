"""The pages of the site that come from sources: README as the first page, settings, and every public name.

A module is public if it is a file or package directly in `distopt` with `__all__`, or a file of `distopt/singa`, which
scripts import as a module of `distopt`; `distopt.errors` is, too, without one. Functions and classes that stand in the
sources are shown by mkdocstrings, from their docstrings. What a module makes while it is imported, which mkdocstrings
cannot see, stands in tables.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from distopt import settings

ROOT = Path(__file__).parents[2]
# Classes beside those of `__all__`: bases that have the documentation, the result of `distopt.init`, parts of a
# transport.
FURTHER = {
    "opt": ["distopt.dist_opt.DistOpt"],
    "model": ["distopt.nn.model.Model"],
    "distopt": ["distopt.comm.world.World"],
    "comm": ["distopt.comm.base.Request", "distopt.comm.work.DoneWork", "distopt.comm.work.RaggedWork"],
}
# Files outside of docs that a generated page shows.
INSTEAD = {"distopt/settings.py": "reference/settings.md"}
TABLES = {
    "functions": ("Functions of one formula", "function", "result"),
    "classes": ("Operations as classes", "class", "function"),
    "others": ("Other names", "name", "value"),
}


def generated() -> dict[str, str]:
    """All generated pages: Markdown by path below docs."""
    pages = {f"reference/api/{name}.md": api(name) for name in public_modules()}
    return {"index.md": first_page(), "reference/settings.md": settings_page(), **pages}


def first_page() -> str:
    """README, with links as they are on the site; the site has no sources, so links to them become plain text."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target in INSTEAD:
            return f"[{text}]({INSTEAD[target]})"
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        return match[0] if re.match("https?:|#", target) else text

    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, (ROOT / "README.md").read_text())
    return f"---\nhide: [navigation]\n---\n\n{text}"


def settings_page() -> str:
    """The docstring of `distopt.settings`: its table."""
    assert settings.__doc__
    return f"# Settings\n\n{settings.__doc__}"


@cache
def public_modules() -> list[str]:
    """Names below `distopt`; `distopt` for the package itself."""
    folder = ROOT / "distopt"
    files = [*folder.glob("[a-z]*.py"), *folder.glob("[a-z]*/__init__.py"), *folder.glob("singa/[a-z]*.py")]
    found = [file for file in files if re.search(r"^__all__\b", file.read_text(), re.M)]
    return ["distopt", "errors", *sorted(file.parent.name if file.stem == "__init__" else file.stem for file in found)]


@cache
def public_names(page: str) -> dict[str, Any]:
    """The public names of a module with their values; of `distopt.torch`, which pages are built without, None each."""
    if page == "torch":
        source = (ROOT / "distopt" / page / "__init__.py").read_text()
        return dict.fromkeys(re.findall(r'^    "(\w+)",$', source, re.M))
    module = import_module(path_of(page))
    return {name: getattr(module, name) for name in getattr(module, "__all__", _own_names(module))}


def _own_names(module: ModuleType) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def path_of(page: str) -> str:
    """The module of a page, by the name that scripts import."""
    return "distopt" if page == "distopt" else f"distopt.{page}"


def source_of(page: str) -> str:
    """The module whose source has the docstrings of a page."""
    return f"distopt.singa.{page}" if (ROOT / "distopt" / "singa" / f"{page}.py").exists() else path_of(page)


def api(page: str) -> str:
    """The page of one public module."""
    path = source_of(page)
    head = "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}"
    lines = [f"# {path_of(page)}", "", f"::: {path}", head, ""]
    rows: dict[str, list[tuple[str, str]]] = {kind: [] for kind in TABLES}
    for name, value in public_names(page).items():
        kind, row = _row(name, value)
        if kind:
            rows[kind].append(row)
        else:
            lines += _shown(f"{path}.{name}", value)
    for further in FURTHER.get(page, []):
        lines += [f"::: {further}", "    options: {show_root_full_path: true}", ""]
    for kind, (title, *heads) in TABLES.items():
        cells = [tuple(heads), ("---", "---"), *rows[kind]] if rows[kind] else []
        lines += [f"## {title}", ""] if cells else []
        lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells] + [""]
    return "\n".join(lines)


def _row(name: str, value: Any) -> tuple[str, tuple[str, str]]:
    """The table of a public name and its row there; the table is empty if mkdocstrings shows the name."""
    if inspect.isclass(value) and {"function", "options"} <= vars(value).keys():
        of = vars(value)["function"].__func__
        text = str(of.__doc__) if of.__name__.startswith("_") else f"`{of.__name__}`"
        return "classes", (f"`{name}({', '.join(value.options)})`", text)
    if inspect.isfunction(value) and value.__code__.co_name == "function":  # a function that another one has made
        return "functions", (f"`{name}{inspect.signature(value)}`", str(value.__doc__))
    if value is None or ((inspect.isfunction(value) or inspect.isclass(value)) and value.__qualname__ == name):
        return "", ("", "")
    if inspect.isfunction(value) or inspect.isclass(value):
        return "others", (f"`{name}`", f"the same as `{value.__qualname__}`")
    text = ", ".join(value) if isinstance(value, dict) else repr(value)
    return "others", (f"`{name}`", f"`{text}`")


def _shown(path: str, value: Any) -> list[str]:
    """The lines by which mkdocstrings shows a name, with the members of bases that no page shows."""
    bases = [base for base in getattr(value, "__mro__", ())[1:] if base.__module__.startswith("distopt")]
    hidden = [base for base in bases if base not in _public_classes()]
    members = sorted({name for base in hidden for name in vars(base) if not name.startswith("_")})
    options = [f"    options: {{inherited_members: [{', '.join(members)}]}}"] if members else []
    return [f"::: {path}", *options, ""]


@cache
def _public_classes() -> set[type]:
    shown = {value for page in public_modules() for value in public_names(page).values() if inspect.isclass(value)}
    further = [path.rpartition(".") for paths in FURTHER.values() for path in paths]
    return shown | {getattr(import_module(module), name) for module, _, name in further}
