"""Documentation names files, headings and places that exist."""

import re

import pytest

from tests.docs.site import pages
from tests.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "distopt|csrc|docs|tests|benchmarks|release"
ARCHITECTURE = (ROOT / "docs/reference/architecture.md").read_text()
ADDITIONS = re.findall(r"^\| (an? .*?) \| (.*) \| `(.*)` \|$", ARCHITECTURE, re.M)
SUFFIXES = (".py", ".h", ".cpp", ".cu")
GENERATED = {ROOT / "docs" / path for path in pages.generated()}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_heading_exists(page):
    text = page.read_text()
    of_singa = page.name in ("singa.md", "singa-tests.md")  # which name SINGA's examples
    folders = FOLDERS if of_singa else f"{FOLDERS}|examples"
    paths = {path.rstrip("./") for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./*-]*", text)}
    missing = [path for path in paths if not any(ROOT.glob(path))]
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#?)([^)]*)\)", text):
        other = (page.parent / target).resolve() if target else page
        headings = re.findall(r"^#+ (.*)", other.read_text(), re.M) if heading and other.exists() else []
        if other in GENERATED:  # and `make docs` checks the heading
            continue
        if not other.exists() or (heading and heading not in map(anchor, headings)):
            missing.append(f"{target}#{heading}")
    assert not missing


@pytest.mark.parametrize(("what", "files", "example"), ADDITIONS, ids=[row[0] for row in ADDITIONS])
def test_an_addition_touches_the_files_that_the_page_lists(what, files, example):
    pattern = re.compile(example.replace("\\|", "|"))
    files_of_sources = [f for top in ("distopt", "csrc") for f in (ROOT / top).rglob("*.*") if f.suffix in SUFFIXES]
    touched = {str(f.relative_to(ROOT)) for f in files_of_sources if pattern.search(f.read_text())}
    assert touched == set(re.findall(r"`([\w/]+\.\w+)`", files))


def test_the_architecture_names_every_room_and_seven_additions():
    rooms = [*(ROOT / "distopt").glob("*/__init__.py"), *(ROOT / "csrc").glob("*/*.h")]
    missing = {str(file.parent.relative_to(ROOT)) for file in rooms} - set(re.findall(r"`(\w+/\w+)`", ARCHITECTURE))
    assert not missing
    assert len(ADDITIONS) == 7


def test_the_picture_has_every_room():
    picture = set(re.findall(r'class="name"[^>]*>([\w.]+)', (ROOT / "docs/reference/architecture.svg").read_text()))
    rooms = {file.parent.name for file in (ROOT / "distopt").glob("*/__init__.py")}
    assert rooms | {file.parent.name for file in (ROOT / "csrc").glob("*/*.h")} <= picture
