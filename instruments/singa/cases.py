"""Runs cases of one test file in this process, and writes each outcome to a file as soon as it is known.

python cases.py MODULE FOLDER SECONDS CASE...   CASE: Class.method; one file per process, as MPI starts several

A case that takes longer than SECONDS ends the process, wherever it hangs. Every case begins with the same seeds, for
some compare a mean of random numbers with narrow bounds.
"""

import faulthandler
import importlib
import json
import os
import random
import sys
import traceback
import unittest
from pathlib import Path

import numpy as np

from distopt import device


class Recorder(unittest.TestResult):
    """Writes one JSON line for the start of each case, and one for its outcome."""

    def __init__(self, path: Path, seconds: float):
        super().__init__()
        self.file = path.open("w", buffering=1)
        self.seconds = seconds

    def write(self, test, outcome: str, reason: str = "") -> None:
        case = ".".join(test.id().split(".")[-2:])
        self.file.write(json.dumps({"case": case, "outcome": outcome, "reason": reason}) + "\n")

    def startTest(self, test) -> None:
        super().startTest(test)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the generator that SINGA's tests use
        device.get_default_device().SetRandSeed(0)
        self.write(test, "started")
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def stopTest(self, test) -> None:
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)

    def addSuccess(self, test) -> None:
        self.write(test, "pass")

    def addSkip(self, test, reason) -> None:
        self.write(test, "skip", reason)

    def addFailure(self, test, err) -> None:
        self.write(test, "fail", " ".join("".join(traceback.format_exception_only(*err[:2])).split()))

    addError = addFailure

    def addSubTest(self, test, subtest, err) -> None:
        if err is not None:
            self.addFailure(test, err)


def main() -> None:
    module, folder, seconds, *cases = sys.argv[1:]
    sys.path.insert(0, str(Path.cwd()))
    importlib.import_module(module)  # an error here ends the process, and says why
    recorder = Recorder(Path(folder) / f"{os.getpid()}.jsonl", float(seconds))
    unittest.defaultTestLoader.loadTestsFromNames([f"{module}.{case}" for case in cases]).run(recorder)


if __name__ == "__main__":
    main()
