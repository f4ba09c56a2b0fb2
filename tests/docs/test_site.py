"""The generated pages of the site."""

import inspect
import re
from dataclasses import fields
from xml.etree import ElementTree

import pytest

from distopt.errors import MissingDependencyError
from distopt.settings import Settings
from tests.processes import ROOT

from .site import pages

NAMES = [(module, name) for module in pages.public_modules() for name in pages.public_names(module)]


def members(value: type) -> list[str]:
    """The methods and properties that a public class defines itself."""
    own = [(name, each) for name, each in vars(value).items() if not name.startswith("_")]
    return [name for name, each in own if callable(getattr(each, "__func__", each)) or isinstance(each, property)]


def test_every_public_module_has_a_page_in_the_navigation():
    navigation = re.findall(r"- reference/api/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(navigation) == sorted(pages.public_modules())
    assert {"opt", "torch", "codecs", "comm", "launch", "checkpoint", "data", "errors"} <= set(navigation)


@pytest.mark.parametrize("module", pages.public_modules())
def test_every_public_name_is_on_the_page_of_its_module(module):
    text, path = pages.generated()[f"reference/api/{module}.md"], pages.source_of(module)
    assert pages.public_names(module)
    for name in pages.public_names(module):
        assert re.search(rf"^::: {path}\.{name}$|^\| `{name}\b", text, re.M), name


def test_every_public_class_function_and_method_has_a_docstring():
    missing = []
    for module, name in NAMES:
        value = pages.public_names(module)[name]
        if not (inspect.isfunction(value) or inspect.isclass(value)) or not value.__module__.startswith("distopt"):
            continue
        if not value.__doc__:
            missing.append(f"{module}.{name}")
        if inspect.isclass(value):
            described = re.findall(r"^ +(\w+): ", str(value.__doc__), re.M)  # under "Attributes:"
            named = {*members(value)} - {*described}
            undocumented = [of for of in sorted(named) if not inspect.getdoc(getattr(value, of))]
            missing += [f"{module}.{name}.{of}" for of in undocumented]
    assert not missing


def test_without_pytorch_its_page_has_the_same_names(monkeypatch):
    pytest.importorskip("torch")
    names = set(pages.public_names("torch"))

    def absent(path):
        raise MissingDependencyError(path)

    monkeypatch.setattr(pages, "import_module", absent)
    pages.public_names.cache_clear()
    try:
        assert set(pages.public_names("torch")) == names
    finally:
        pages.public_names.cache_clear()


def test_the_page_of_settings_has_every_setting():
    variables = re.findall(r"^\| `DISTOPT_(\w+)` \|", pages.settings_page(), re.M)
    assert sorted(variables) == sorted(field.name.upper() for field in fields(Settings))


def test_the_first_page_links_to_pages_and_pictures_only():
    targets = re.findall(r"\]\(([^)\s]+)\)", pages.first_page())
    assert "guide/start.md" in targets
    assert "reference/settings.md" in targets
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.*")} | set(pages.generated())
    assert {target.partition("#")[0] for target in targets if not target.startswith(("#", "http"))} <= files


def test_the_recording_shows_a_lost_machine_and_its_return():
    path = ROOT / "docs/healing.svg"
    texts = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert path.stat().st_size < 100_000
    assert sum("healed: " in text for text in texts) == 2
    assert "(docs/healing.svg)" in (ROOT / "README.md").read_text()
