"""The `distopt` command: exit codes, and one line for errors."""

import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

from distopt import cli
from distopt.errors import DistoptError, UsageError


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["fly"], "distopt: * (see distopt --help)\n"),
        (["doctor", "now"], "distopt doctor: *now (see distopt doctor --help)\n"),
        (["doctor", "--nope"], "distopt doctor: unrecognized arguments: --nope (see distopt doctor --help)\n"),
    ],
)
def test_wrong_arguments_get_one_line_and_code_2(argv, text, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert fnmatchcase(err, text)


@pytest.mark.parametrize("argv", [[], ["--help"], ["doctor", "--help"]])
def test_help(argv, capsys):
    assert cli.main(argv) == 0
    assert "usage: distopt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("size '1X' is not a number"), 2, "size '1X'"),
        (DistoptError("no room"), 1, "no room"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (IsADirectoryError(21, "Is a directory", "/runs/rank-0-1.json"), 1, "Is a directory: '/runs/rank-0-1.json'"),
    ],
)
def test_errors_of_a_command(monkeypatch, capsys, error, code, text):
    def fail(args):
        raise error

    monkeypatch.setattr("distopt.cli.doctor.run", fail)
    assert cli.main(["doctor"]) == code
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_a_reader_that_leaves_early_gives_no_traceback():
    code = "import sys; from distopt import cli; sys.exit(cli.main(['doctor']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
