"""The examples as a user runs them: output, exit codes, and one line with the cure for each wrong input."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.data import idx, synthetic
from tests.events import scalars
from tests.processes import ROOT, Ended, Program, mpiexec, on_a_terminal

MULTIPROCESS = str(ROOT / "examples/mnist_multiprocess.py")
DIST = str(ROOT / "examples/mnist_dist.py")
TRAIN, TEST = 384, 100


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    for name, count, seed in (("train", TRAIN, 1), ("t10k", TEST, 2)):
        images, labels = synthetic.digits(count, seed)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx.encode(images[:, 0]))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx.encode(labels.astype(np.uint8)))
    return folder


def python(*args: str, env: dict[str, str] | None = None) -> Ended:
    return Program([sys.executable, *args], env).end()


def multiprocess(*args: str, world_size: str = "2") -> Ended:
    return python(MULTIPROCESS, *args, "--", world_size)


def under_mpi(*args: str) -> Ended:
    return mpiexec(2, DIST, *args)


BOTH = pytest.mark.parametrize("run", [multiprocess, under_mpi])
EPOCH = re.compile(
    r"Starting Epoch 0:\n"
    r"Training loss = (\d+\.\d{6}), training accuracy = (0\.\d{6})\n"
    r"Evaluation accuracy = (0\.\d{6}), Elapsed Time = \d+\.\d{3}s, \d+ images/s\n"
)


def test_both_launchers_print_the_same_numbers(digits):
    outputs = [run("--data-dir", str(digits), "-m", "1", "-b", "32") for run in (multiprocess, under_mpi)]
    figures = []
    for ended in outputs:
        assert ended.code == 0, ended.stderr
        match = EPOCH.search(ended.stdout)
        assert match, ended.stdout
        figures.append(match.groups())
    assert figures[0] == figures[1]


def test_one_process_without_a_launcher(digits):
    ended = python(DIST, "--data-dir", str(digits), "-m", "1", "-b", "32", "--no-augment")
    assert ended.code == 0, ended.stderr
    assert EPOCH.search(ended.stdout)


@pytest.mark.slow(kept=2)
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize(
    ("script", "asked"),
    [
        *((script, "-h") for script in ("mnist_multiprocess", "mnist_dist", "mnist_slurm", "zoo/train")),
        *((script, "-h") for script in ("pytorch/mnist_ddp", "pytorch/tensor_parallel", "slurm/submit")),
        *((script, "-h") for script in ("pytorch/language/serve", "slurm/fetch_mnist")),
        ("mnist_dist", "--help"),
        *(("template/train", asked) for asked in ("-h", "-help", "--help")),  # an option of its own, not argparse's
    ],
)
def test_help(script, asked):
    if script.partition("/")[0] in ("pytorch", "template"):
        pytest.importorskip("torch")
    if script == "slurm/submit":
        pytest.importorskip("submitit")
    ended = python(str(ROOT / f"examples/{script}.py"), asked)
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: ")


def test_an_epoch_shows_its_progress_on_a_terminal(digits):
    code, shown = on_a_terminal([DIST, "--data-dir", str(digits), "-m", "1", "-b", "16"])
    assert code == 0, shown
    assert re.search(r"\d images/s, loss=\d", shown), shown
    assert shown.rpartition("\r")[2] == ""
    assert shown.split("\r")[-2].strip() == "", "the line is wiped out"


def test_an_epoch_shows_its_progress_in_a_log(digits):
    """A line every few seconds; here after each step."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); import train_cnn; train_cnn.LOG_SECONDS = 0.0; "
    code += "sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    ended = python("-c", code, str(ROOT / "examples"), str(DIST), "--data-dir", str(digits), "-m", "1", "-b", "32")
    assert ended.code == 0, ended.stderr
    assert EPOCH.search(ended.stdout), "figures stand alone"
    shown = [int(done) for done in re.findall(r"^Epoch 0 \[(\d+)/\d+\], \d+ images/s, loss=\d", ended.stderr, re.M)]
    assert len(shown) > 1
    assert shown == sorted(set(shown))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py", "pytorch/mnist_ddp.py"])
def test_numbers_for_tensorboard(script, digits, tmp_path):
    pytest.importorskip("tensorboardX")
    if "pytorch" in script:
        pytest.importorskip("torch")
    epochs = "--max-epoch" if "dist" in script else "--epochs"
    options = [epochs, "1", "--batch-size", "8", "--tensorboard", str(tmp_path)]
    command = ["-m", "distopt", "run", "--nproc-per-node", "2", str(ROOT / "examples" / script), *options]
    ended = python(*command, env={"DISTOPT_DATA_DIR": str(digits)})
    assert ended.code == 0, ended.stderr
    shown = scalars(tmp_path)
    steps = TRAIN // 16
    for name in ("train/loss", "train/learning rate", "speed/images per s", "speed/ms of waiting per step"):
        assert list(shown[name]) == list(range(10, steps + 1, 10)), name
    assert list(shown["speed/bytes per step"].values()) == pytest.approx([4 * 431_080] * (steps // 10), rel=0.01)
    assert list(shown["test set/accuracy"]) == [steps]


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py", "pytorch/mnist_ddp.py"])
def test_tensorboard_without_its_package(script, tmp_path):
    if "pytorch" in script:
        pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find_spec = util.find_spec\n"
        "util.find_spec = lambda name, *package: None if name == 'tensorboardX' else find_spec(name, *package)\n"
    )
    ended = python(str(ROOT / "examples" / script), "--tensorboard", "x", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.code == 2
    assert "tensorboardX is not installed; pip install tensorboardX tensorboard" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py"])
def test_an_accuracy_on_generated_digits_says_so(script, tmp_path):
    (tmp_path / "home").write_text("no folder, and so no cache")
    env = {"HOME": str(tmp_path / "home"), "DISTOPT_DATA_DIR": ""}
    epochs = "-e" if "slurm" in script else "-m"
    ended = python(str(ROOT / "examples" / script), epochs, "1", "-b", "6000", env=env)
    assert ended.code == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "ccuracy" in line]
    assert lines
    assert all("(generated digits, not MNIST)" in line for line in lines)


@pytest.mark.slow
def test_fetching_mnist_says_whether_it_is_absent_broken_or_there(digits, tmp_path):
    def fetch(home: str, folder: Path | str) -> Ended:
        env = {"HOME": str(tmp_path / home), "DISTOPT_DATA_DIR": str(folder)}
        return python(str(ROOT / "examples/slurm/fetch_mnist.py"), env=env)

    (tmp_path / "home").write_text("no folder, and so no cache")
    absent = fetch("home", "")
    assert (absent.code, absent.stdout) == (1, "")
    assert "set DISTOPT_DATA_DIR" in absent.stderr
    broken = fetch("home", tmp_path)
    assert (broken.code, broken.stdout) == (1, "")
    assert f"DataError: {tmp_path} has no file train-images" in broken.stderr
    there = fetch("home", digits)
    assert (there.code, there.stdout) == (0, f"384 images to train on and 100 to test: a custom data set in {digits}\n")


def assert_one_line(ended: Ended, *parts: str) -> None:
    said = [line for line in ended.stderr.splitlines() if "error:" in line or "failed:" in line]
    assert ended.code == 2, ended
    assert len(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    for part in parts:
        assert part in said[0]


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=1)
@pytest.mark.parametrize("world_size", ["0", "-1", "two", "1.5"])
def test_world_size(world_size):
    assert_one_line(multiprocess(world_size=world_size), world_size)


@pytest.mark.slow(kept=1)
@pytest.mark.sweep(rest=3)
@BOTH
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("-d fp8", ("fp8", "fp16", "sparseTopK")),
        ("-b 193", ("193", "use batch_size 192 or less")),
        ("--data-dir /nowhere/at/all", ("/nowhere/at/all",)),
    ],
)
def test_wrong_options(run, words, parts, digits):
    assert_one_line(run("--data-dir", str(digits), *words.split()), *parts)


# -- checkpoints ------------------------------------------------------------------------------------------------------
FIGURES = re.compile(r"Training loss = (\S+), training accuracy = (\S+)\nEvaluation accuracy = (\S+),")


@pytest.mark.slow
def test_an_example_goes_on_in_the_middle_of_an_epoch(digits, tmp_path):
    run, folder = multiprocess, tmp_path / "checkpoints"
    options = ["--data-dir", str(digits), "-b", "32", "-d", "sparseTopK"]  # six steps per epoch
    whole = run(*options, "-m", "2")
    saving = [*options, "--checkpoint", str(folder), "--checkpoint-every", "4"]
    first = run(*saving, "-m", "1")
    assert FIGURES.findall(first.stdout) == FIGURES.findall(whole.stdout)[:1]
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000000004", "step-0000000006"]
    shutil.rmtree(folder / "step-0000000006")
    second = run(*saving, "-m", "2")
    assert second.stdout.startswith(f"Resuming from {folder / 'step-0000000004'} (step 4, epoch 0)\nStarting Epoch 0:")
    assert FIGURES.findall(second.stdout) == FIGURES.findall(whole.stdout)
    assert len(FIGURES.findall(whole.stdout)) == 2
    third = run(*saving, "-m", "2")
    assert "Resuming from" in third.stdout
    assert third.stdout.endswith("(step 12, epoch 2)\n")
    anew = run(*saving, "-m", "1", "--reset")
    assert anew.stdout.startswith("Starting Epoch 0:")
    assert FIGURES.findall(anew.stdout) == FIGURES.findall(whole.stdout)[:1]


@pytest.mark.slow
def test_options_of_checkpoints_that_make_no_sense(digits, tmp_path):
    assert_one_line(multiprocess("--data-dir", str(digits), "--reset"), "--reset needs --checkpoint DIR")
    options = ["--data-dir", str(digits), "-b", "32"]
    assert_one_line(multiprocess(*options, "--checkpoint", str(tmp_path), "--checkpoint-every", "-1"), "less than 1")
    (tmp_path / "file").write_text("")
    assert_one_line(multiprocess(*options, "--checkpoint", str(tmp_path / "file" / "x")), "file", "another folder")
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "checkpoint.json").write_text("{}")
    ended = multiprocess(*options, "--checkpoint", str(tmp_path))
    assert_one_line(ended, "none of the 1 checkpoints", "not written by distopt.checkpoint", "--reset")
