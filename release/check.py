"""Make in dist all that a release uploads, and check it: python -m release.check [PYTHON ...]

The wheels and the archive of the sources, which is built, installed and run here; so this machine
needs a compiler. The version in pyproject.toml must be that of the newest section of CHANGELOG.md, and of a tag of the
commit if it has one.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

from .wheels import PYTHONS, ROOT, make, run, tool

DIST = ROOT / "dist"


def disagreement(project: str, changelog: str, tags: Sequence[str]) -> str:
    """The first version that is not that of the project, in a sentence; empty if all agree.

    Args:
        project: text of pyproject.toml.
        changelog: text of CHANGELOG.md.
        tags: the tags of the commit.
    """
    version = re.search(r'^version = "(.*)"$', project, re.M)[1]
    newest = re.search(r"^## \[(.*?)\]", changelog, re.M)[1]
    if newest != version:
        return f"the newest section of CHANGELOG.md is {newest}, the version in pyproject.toml is {version}"
    wrong = [tag for tag in tags if tag.startswith("v") and tag != f"v{version}"]
    return f"the commit has the tag {wrong[0]}, the version in pyproject.toml is {version}" if wrong else ""


def check_versions() -> None:
    """Exits if versions disagree."""
    tags = run("git", "tag", "--points-at", "HEAD").split()
    said = disagreement((ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text(), tags)
    if said:
        sys.exit(f"release: {said}")


def check_sources() -> None:
    """Make the archive of the sources, install it in a new environment, and run `distopt doctor` there."""
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    run(tool("uv"), "build", "--sdist", "--out-dir", DIST, ROOT)
    archive = next(DIST.glob("*.tar.gz"))
    run(tool("twine"), "check", "--strict", archive)
    folder = ROOT / "build" / "release"
    shutil.rmtree(folder, ignore_errors=True)
    run(tool("uv"), "venv", "--quiet", folder)
    python = folder / "bin" / "python"
    run(tool("uv"), "pip", "install", "--quiet", "--no-cache", "--python", python, archive)
    print(run(python, "-I", "-m", "distopt", "doctor"))
    print(f"{archive.stat().st_size:,} bytes  {archive}")


if __name__ == "__main__":
    check_versions()
    make(DIST, sys.argv[1:] or PYTHONS)
    check_sources()
