"""The generated pages of the site, and that its check finds what it is for."""

import inspect
import re
from dataclasses import fields

import pytest

from distopt.errors import MissingDependencyError
from distopt.settings import Settings
from tests.processes import ROOT

from .site import check, pages

NAMES = [(module, name) for module in pages.public_modules() for name in pages.public_names(module)]


def members(value: type) -> list[str]:
    """The methods and properties that a public class defines itself."""
    own = [(name, each) for name, each in vars(value).items() if not name.startswith("_")]
    return [name for name, each in own if callable(getattr(each, "__func__", each)) or isinstance(each, property)]


def test_every_public_module_has_a_page_in_the_navigation():
    navigation = re.findall(r"- reference/api/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(navigation) == sorted(pages.public_modules())
    assert {"opt", "torch", "compress", "comm", "launch", "checkpoint", "data", "errors"} <= set(navigation)


@pytest.mark.parametrize("module", pages.public_modules())
def test_every_public_name_is_on_the_page_of_its_module(module):
    text, path = pages.generated()[f"reference/api/{module}.md"], pages.path_of(module)
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


def test_the_first_page_links_to_pages_only():
    targets = re.findall(r"\]\(([^)\s]+)\)", pages.first_page())
    assert "guide/start.md" in targets
    assert "reference/settings.md" in targets
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | set(pages.generated())
    assert {target.partition("#")[0] for target in targets if not target.startswith(("#", "http"))} <= files


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site of two pages without a fault."""
    monkeypatch.setattr(pages, "public_modules", lambda: ["data"])
    (tmp_path / "reference" / "api").mkdir(parents=True)
    names = "".join(f'<h2 id="distopt.data.{name}">{name}</h2>' for name in pages.public_names("data"))
    (tmp_path / "reference" / "api" / "data.html").write_text(f'{names}<a href="../../index.html#here">back</a>')
    (tmp_path / "site.js").touch()
    text = '<h1 id="here">Site</h1><a href="reference/api/data.html#distopt.data.ShardedSampler">x</a>'
    (tmp_path / "index.html").write_text(f'{text}<a href="https://example.org">y</a><script src="site.js"></script>')
    assert check.faults(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("page", "old", "new", "fault"),
    [
        ("index.html", "api/data.html#", "api/date.html#", "index.html: no reference/api/date.html#"),
        ("index.html", "data.html#distopt.data", "data.html#distopt.date", "index.html: no .*#distopt.date.Sh"),
        ("index.html", 'src="site.js"', 'src="site.css"', "index.html: no site.css"),
        ("index.html", 'src="site.js"', 'src="//example.org/site.js"', "index.html loads //example.org/site.js from"),
        ("reference/api/data.html", "data_partition", "data_part", "distopt.data.data_partition is on no page"),
    ],
)
def test_the_check_finds_a_fault(site, page, old, new, fault):
    text = (site / page).read_text()
    assert old in text
    (site / page).write_text(text.replace(old, new))
    (found,) = check.faults(site)
    assert re.match(fault, found)
