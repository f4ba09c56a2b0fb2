"""What is installed: packages that messages and documents name, builds that cannot work, versions of a release."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distopt.errors import _PACKAGES, pip_install
from release.check import absolute_links, disagreement, fill_address, newest_section

ROOT = Path(__file__).parents[2]
# On the package index, distopt is another project, and distopt-train is not there. A folder or a wheel follows a slash.
BY_NAME = re.compile(r"""\b(pip3?|uv|uv pip) (install|add)\b[^\n`]*[\s"'=]distopt(-train)?(?![\w./-])""")


def test_no_file_has_pip_install_distopt_by_its_name():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git's")
    for path in filter(Path.is_file, (ROOT / name for name in listed.stdout.splitlines())):
        assert not [line for line in path.read_text(errors="replace").splitlines() if BY_NAME.search(line)], path


@pytest.fixture
def project():
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_requires_what_it_imports_and_nothing_else(project):
    required = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    code = "".join(path.read_text() for path in (ROOT / "distopt").rglob("*.py"))
    assert required == {name for name in (*required, "tqdm") if re.search(rf"^\s*(import|from) {name}\b", code, re.M)}


def test_hints_name_the_packages_of_the_extras(project):
    extras = project["optional-dependencies"]
    for extra in _PACKAGES:
        others = [each for each in extras[extra] if not each.startswith(project["name"])]  # not its other extras
        wanted = [re.match(r"[\w-]+(\[\w+\])?", requirement)[0] for requirement in others]
        assert pip_install(extra).replace("--upgrade ", "").replace("'", "") == f"pip install {' '.join(wanted)}"


# In place of another Python: what CMake asks of this one is answered differently.
FREE_THREADED = """
import sysconfig
abi = "cpython-314t-x86_64-linux-gnu"
sysconfig.get_config_vars().update(SOABI=abi, EXT_SUFFIX=f".{abi}.so")
"""
NO_HEADERS = """
import sysconfig
paths = sysconfig.get_paths
sysconfig.get_path = lambda name, *a, **k: "/nowhere" if "include" in name else paths(*a, **k)[name]
sysconfig.get_paths = lambda *a, **k: {n: "/nowhere" if "include" in n else p for n, p in paths(*a, **k).items()}
sysconfig.get_config_vars().update(INCLUDEPY="/nowhere", CONFINCLUDEPY="/nowhere")
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"pip install {name}"
    return found


@pytest.mark.parametrize(
    ("python", "compiler", "said"),
    [
        ("", False, "distopt needs a C++17 compiler, and there is none: apt install g++, or set CXX to one"),
        (NO_HEADERS, True, "distopt needs the headers of Python, and there are none: apt install python3-dev"),
        (FREE_THREADED, True, "this free-threaded Python lacks: use the other build of it"),
    ],
    ids=["no compiler", "no headers", "free-threaded"],
)
def test_a_build_that_cannot_work_says_what_to_do(python, compiler, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(python)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("CXX", None)
    if not compiler:
        env["PATH"] = str(tmp_path)
    options = [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path / "build"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.returncode != 0
    assert said in " ".join(ended.stderr.split())


PROJECT = '[project]\nname = "distopt-train"\nversion = "1.2.0"\n[tool.scikit-build]\nminimum-version = "1.0"\n'


@pytest.mark.parametrize(
    ("sections", "cited", "tags", "said"),
    [
        (["1.2.0", "1.1.0"], "1.2.0", [], ""),
        (["1.2.0"], "1.2.0", ["v1.2.0", "before-review"], ""),
        (["Unreleased", "1.2.0"], "1.2.0", [], "the newest section of CHANGELOG.md is Unreleased, "),
        (["1.1.0", "1.2.0"], "1.2.0", [], "the newest section of CHANGELOG.md is 1.1.0, "),
        (["1.2.0"], "1.1.0", [], "the version in CITATION.cff is 1.1.0, "),
        (["1.2.0"], "1.2.0", ["v1.2.0", "v1.1.0"], "the commit has the tag v1.1.0, "),
    ],
)
def test_versions_that_disagree(sections, cited, tags, said):
    changelog = "# Changelog\n\n" + "".join(f"## [{section}] - 2026-11-27\n\n- A change.\n\n" for section in sections)
    found = disagreement(PROJECT, changelog, f"cff-version: 1.0.0\nversion: {cited}\n", tags)
    assert found == (said and f"{said}the version in pyproject.toml is 1.2.0")


def test_the_notes_are_the_newest_section():
    first, second = "- One.\n\n### Jobs\n\n- Two.\n", "## [0.9.0] - 2026-10-01\n\n- Old.\n"
    heading = "# Changelog\n\n## [1.0.0] - 2026-11-30\n\n"
    assert newest_section(f"{heading}{first}") == newest_section(f"{heading}{first}\n{second}") == ("1.0.0", first)


def test_the_address_of_the_repository_is_filled_in(tmp_path):
    pages = [tmp_path / "README.md", tmp_path / "SECURITY.md"]
    for page in pages:
        page.write_text("git clone CLONE_URL && cd distopt\n")
    assert fill_address(pages, "") == ["README.md", "SECURITY.md"]
    assert fill_address(pages, "https://host.example/distopt") == []
    assert all(page.read_text() == "git clone https://host.example/distopt && cd distopt\n" for page in pages)


def test_the_package_index_gets_links_by_address():
    page = "![A](docs/a.svg) [b](docs/b.md#c), [d](https://d.example/e), [f](#g), [h](LICENSE)"
    files = "https://host.example/distopt/{}/v1.2.0"
    expected = page.replace("(docs/a", f"({files.format('raw')}/docs/a")
    for name in ("docs/b", "LICENSE"):
        expected = expected.replace(f"({name}", f"({files.format('blob')}/{name}")
    for url in ("https://host.example/distopt", "https://host.example/distopt.git", "https://host.example/distopt/"):
        assert absolute_links(page, url, "1.2.0") == expected
