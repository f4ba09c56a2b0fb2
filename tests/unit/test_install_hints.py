"""What messages, documents and the Makefile have pip install."""

import re
import subprocess
from pathlib import Path

import pytest

from distopt.errors import _PACKAGES, pip_install

ROOT = Path(__file__).parents[2]
# On the package index, distopt is another project, and distopt-train is not there. A folder or a wheel follows a slash.
BY_NAME = re.compile(r"""\b(pip3?|uv|uv pip) (install|add)\b[^\n`]*[\s"'=]distopt(-train)?(?![\w./-])""")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git's")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_file_has_pip_install_distopt_by_its_name():
    found = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in tracked()
        if path.is_file()
        for line in path.read_text(errors="replace").splitlines()
        if BY_NAME.search(line)
    }
    assert not found


def test_the_package_requires_what_it_imports_and_nothing_else():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    code = "".join(path.read_text() for path in (ROOT / "distopt").rglob("*.py"))
    assert required == {name for name in (*required, "tqdm") if re.search(rf"^\s*(import|from) {name}\b", code, re.M)}


def test_hints_name_the_packages_of_the_extras():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in _PACKAGES:
        wanted = [
            re.match(r"[\w-]+(\[\w+\])?", requirement)[0] for requirement in project["optional-dependencies"][extra]
        ]
        assert pip_install(extra).replace("--upgrade ", "").replace("'", "") == f"pip install {' '.join(wanted)}"
