"""The runner of SINGA's unit tests counts what crashes, hangs or cannot be imported as failed."""

import pytest

from tests.singa import unit
from tests.singa.checkout import environment

CASES = """
import os, time, unittest

class TestMethods(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_fails(self): self.assertEqual([1], [2])
    def test_c_dies(self): os._exit(3)
    def test_d_hangs(self): time.sleep(60)
    @unittest.skip("CUDA is not enabled")
    def test_e_needs_a_gpu(self): pass
    @unittest.skip("no time")
    def test_f_skips(self): pass
    def test_g_passes(self): pass
    def helper(self): pass
"""


@pytest.fixture
def report(tmp_path, monkeypatch) -> unit.Report:
    monkeypatch.setattr(unit, "CASE_SECONDS", 1.0)
    (tmp_path / "test_tensor.py").write_text(CASES)
    return unit.run_file(tmp_path, "test_tensor.py", None, environment())


@pytest.mark.slow
def test_no_case_vanishes(report):
    assert report.passed == ["test_a_passes", "test_g_passes"]
    assert report.skipped == ["test_e_needs_a_gpu"]
    reasons = report.failed
    assert list(reasons) == ["test_b_fails", "test_c_dies", "test_d_hangs", "test_f_skips"]
    assert reasons["test_b_fails"].startswith("AssertionError: Lists differ: [1] != [2]")
    assert reasons["test_c_dies"].startswith("ended the process with exit code 3")
    assert reasons["test_d_hangs"] == "took longer than 1 s"
    assert reasons["test_f_skips"] == "no time"


def test_an_import_error_fails_all_cases(tmp_path):
    (tmp_path / "test_opt.py").write_text(CASES.replace("import os", "import absent_module, os"))
    report = unit.run_file(tmp_path, "test_opt.py", None, environment())
    assert len(report.failed) == len(report.cases) == 7
    assert all("No module named 'absent_module'" in reason for reason in report.failed.values())


@pytest.mark.slow
def test_faults_are_named(report):
    listed = {"test_b_fails": "why", "test_g_passes": "why", "test_h": "why"}
    assert unit.faults_of([report], {"test_tensor.py": listed}) == [
        "test_tensor.py: 3 cases fail that are not listed",
        "test_tensor.py: test_g_passes passes; take it from the list",
        "test_tensor.py: test_h is listed, but there is no such case",
        "test_tensor.py: 3 cases are listed; 1 of 6 may be",
    ]
    report.failed = {"test_b_fails": "why"}
    assert unit.faults_of([report], {"test_tensor.py": {"test_b_fails": "why"}}) == []
    report.file = "test_opt.py"
    assert unit.faults_of([report], {"test_opt.py": {"test_b_fails": "why"}}) == [
        "test_opt.py: 1 cases are listed; 0 of 6 may be"
    ]
