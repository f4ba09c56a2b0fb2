"""Make in dist all that a release uploads, and check it: python -m release.check [--clone-url URL] [PYTHON ...]

The wheels for all machines; the archive of the sources, which is built, installed and run here, so that this machine
needs a compiler; the site; the newest section of CHANGELOG.md as NOTES.md; and SHA256SUMS. The version in
pyproject.toml must be that of this section, of CITATION.cff, and of a tag of the commit if it has one. In README.md and
SECURITY.md, CLONE_URL is the place of the repository's address; `--clone-url`, or `make release CLONE_URL=...`, fills
it in. The README of wheels and sources, which the package index shows, then links to the repository's files by address.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .wheels import MACHINES, PYTHONS, ROOT, make, run, tool

DIST = ROOT / "dist"
PLACEHOLDER = "CLONE_URL"
WITH_ADDRESS = (ROOT / "README.md", ROOT / "SECURITY.md")


def fill_address(pages: Sequence[Path], url: str) -> list[str]:
    """Write the repository's address into pages.

    Args:
        pages: files that have the placeholder.
        url: the address; empty: the files stay as they are.

    Returns:
        The names of the files that still have the placeholder.
    """
    if url:
        for page in pages:
            page.write_text(page.read_text().replace(PLACEHOLDER, url))
    return [page.name for page in pages if PLACEHOLDER in page.read_text()]


def absolute_links(text: str, url: str, version: str) -> str:
    """A page of which links and pictures name files of the repository by address, at the tag of the version."""
    address = url.removesuffix("/").removesuffix(".git")
    text = re.sub(r"!\[(.*?)\]\((?!https?:|#)", rf"![\1]({address}/raw/v{version}/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({address}/blob/v{version}/", text)


@contextmanager
def readme_for_index(url: str, version: str) -> Iterator[None]:
    """In the body of a `with`, README.md has absolute links, if there is an address."""
    page = ROOT / "README.md"
    text = page.read_text()
    try:
        if url:
            page.write_text(absolute_links(text, url, version))
        yield
    finally:
        page.write_text(text)


def newest_section(changelog: str) -> tuple[str, str]:
    """The version of the first section, and the text below its heading."""
    found = re.search(r"^## \[(.*?)\].*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return found[1], found[2].strip() + "\n"


def disagreement(project: str, changelog: str, citation: str, tags: Sequence[str]) -> str:
    """The first version that is not that of the project, in a sentence; empty if all agree.

    Args:
        project: text of pyproject.toml.
        changelog: text of CHANGELOG.md.
        citation: text of CITATION.cff.
        tags: the tags of the commit.
    """
    version = re.search(r'^version = "(.*)"$', project, re.M)[1]
    newest, _ = newest_section(changelog)
    if newest != version:
        return f"the newest section of CHANGELOG.md is {newest}, the version in pyproject.toml is {version}"
    cited = re.search(r"^version: (.*)$", citation, re.M)[1]
    if cited != version:
        return f"the version in CITATION.cff is {cited}, the version in pyproject.toml is {version}"
    wrong = [tag for tag in tags if tag.startswith("v") and tag != f"v{version}"]
    return f"the commit has the tag {wrong[0]}, the version in pyproject.toml is {version}" if wrong else ""


def check_versions() -> str:
    """The version; exits if versions disagree."""
    tags = run("git", "tag", "--points-at", "HEAD").split()
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff")]
    said = disagreement(*texts, tags)
    if said:
        sys.exit(f"release: {said}")
    return newest_section(texts[1])[0]


def check_sources() -> None:
    """Make the archive of the sources, install it in a new environment, and run `distopt doctor` there."""
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


def add_pages(version: str) -> None:
    """Put the site and the notes into dist, and the checksums of all that is there."""
    run("make", "docs")
    shutil.make_archive(str(DIST / f"distopt-{version}-site"), "zip", ROOT / "build" / "site")
    (DIST / "NOTES.md").write_text(newest_section((ROOT / "CHANGELOG.md").read_text())[1])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.glob("[!.]*"))]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clone-url", default="", metavar="URL", help="address of the repository, for git clone")
    parser.add_argument("pythons", nargs="*", default=PYTHONS, metavar="PYTHON")
    options = parser.parse_args()
    version = check_versions()
    unfilled = fill_address(WITH_ADDRESS, options.clone_url)
    shutil.rmtree(DIST, ignore_errors=True)
    with readme_for_index(options.clone_url, version):
        make(DIST, options.pythons, MACHINES)
        check_sources()
    add_pages(version)
    if unfilled:
        print(f"not to be uploaded yet: {' and '.join(unfilled)} have {PLACEHOLDER}; pass --clone-url URL")
