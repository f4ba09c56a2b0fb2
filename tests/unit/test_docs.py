"""Documentation names files, headings and places that exist; README and docs/guide/training.md run as they are."""

import re
import subprocess
import sys

import numpy as np
import pytest

from distopt import opt
from tests.docs import blocks
from tests.docs.site import pages
from tests.processes import ROOT, Program

PAGES = [ROOT / page for page in blocks.PAGES]
FOLDERS = "distopt|csrc|docs|tests|benchmarks|release"
ARCHITECTURE = (ROOT / "docs/reference/architecture.md").read_text()
ADDITIONS = re.findall(r"^\| (an? .*?) \| (.*) \| `(.*)` \|$", ARCHITECTURE, re.M)
SUFFIXES = (".py", ".h", ".cpp", ".cu")
SOURCES = [f for top in ("distopt", "csrc") for f in (ROOT / top).rglob("*.*") if f.suffix in SUFFIXES]
GENERATED = {ROOT / "docs" / path for path in pages.generated()}


def test_the_site_is_built_without_pytorch():
    """The download of a PyTorch for CUDA takes longer than all else."""
    code = "import sys; sys.modules['torch'] = None; from tests.docs.site import pages; print(pages.generated())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == f"{pages.generated()}\n"
    command = ["make", "-n", "docs", "TEST_EXTRAS=test,oracle", "VENV=build/none"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "mkdocs build" in plan
    assert not re.search("oracle|torch", plan)


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
        anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
        if not other.exists() or (heading and heading not in anchors):
            missing.append(f"{target}#{heading}")
    assert not missing


@pytest.mark.parametrize(("what", "files", "example"), ADDITIONS, ids=[row[0] for row in ADDITIONS])
def test_an_addition_touches_the_files_that_the_page_lists(what, files, example):
    pattern = re.compile(example.replace("\\|", "|"))
    touched = {str(f.relative_to(ROOT)) for f in SOURCES if pattern.search(f.read_text())}
    assert touched == set(re.findall(r"`([\w/]+\.\w+)`", files))


def test_the_architecture_and_its_picture_have_every_room():
    rooms = [*(ROOT / "distopt").glob("*/__init__.py"), *(ROOT / "csrc").glob("*/*.h")]
    assert not ({str(file.parent.relative_to(ROOT)) for file in rooms} - set(re.findall(r"`(\w+/\w+)`", ARCHITECTURE)))
    assert len(ADDITIONS) == 8
    picture = set(re.findall(r'class="name"[^>]*>([\w.]+)', (ROOT / "docs/reference/architecture.svg").read_text()))
    rooms = {file.parent.name for file in (ROOT / "distopt").glob("*/__init__.py")}
    assert rooms | {file.parent.name for file in (ROOT / "csrc").glob("*/*.h")} <= picture


README = (ROOT / "README.md").read_text()
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]


def test_shell_commands_are_run_by_ci():
    """Scripts by `make examples`."""
    run = (ROOT / ".ci/run").read_text() + (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    assert "make examples\n" in run
    assert {"make mnist", "make test"} < set(SHELL)
    for command in SHELL:
        assert re.search(rf"^\t?{re.escape(command)}\b", run, re.M), f"{command!r} is in README and not in .ci/run"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_python_snippets_run(code, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(code)
    ended = Program(["env", "-C", str(tmp_path), sys.executable, str(script)]).end()
    assert ended.code == 0, ended.stderr
    assert sorted(line.rpartition(" ")[0] for line in ended.stdout.splitlines()) == ["[rank 1] loss", "loss"]


def test_common_errors_are_those_of_the_code():
    page = (ROOT / "docs/guide/faults.md").read_text()
    table = page[page.index("| you see |") :].partition("\n\n")[0]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.M)
    pieces = [piece.strip() for text in quoted for piece in re.split(r"\.\.\.|\d+|all_reduce|[(),#]", text)]
    sources = re.sub(r'"\s+f?"', "", "\n".join(path.read_text() for path in SOURCES))
    assert len(quoted) == 6
    for piece in pieces:
        assert piece in sources, f"docs/guide/faults.md quotes {piece!r}, which no code says"


TRAINING = (ROOT / "docs" / "guide" / "training.md").read_text()


def test_the_examples_and_names_of_training_are_right(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "training"}
    for code in re.findall(r"```python\n(.*?)```", TRAINING, re.S):
        exec(code, names)
    sgd, net = names["sgd"], names["net"]
    model, *layers, scores, norm = capsys.readouterr().out.splitlines()
    assert model == "Net, 147 parameters"
    assert len(layers) == 3
    assert scores.startswith("after epoch 2: [")
    assert 0 < float(norm) != sgd.grad_norm > 0
    assert sgd.step_counter.item() == 1 + 2 + 1 + 2 + 1, "updates"
    assert sgd.lr.schedule(0) == 0.1
    assert all(np.isfinite(param.array).all() for param in net.get_params().values())
    names = re.findall(r"^\| `(\w+)\(", TRAINING, re.M)
    assert len(names) == 6
    for name in names:
        assert issubclass(getattr(opt, name), opt.DecayScheduler)


def test_one_step_enters_few_files_and_the_docs_show_them():
    stdout = Program([sys.executable, "-m", "tests.unit.gradient_path"]).end().stdout
    *way, total = stdout.strip().splitlines()
    files, visits = map(int, re.fullmatch(r"(\d+) files, (\d+) visits", total).groups())
    assert files <= 8
    assert len(way) == visits <= 14
    assert "\n".join(way) in ARCHITECTURE, stdout
