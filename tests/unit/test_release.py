"""Checks that `make release` makes before it builds anything."""

import pytest

from release.check import disagreement

PROJECT = '[project]\nname = "distopt-train"\nversion = "1.2.0"\n[tool.scikit-build]\nminimum-version = "1.0"\n'


@pytest.mark.parametrize(
    ("sections", "tags", "said"),
    [
        (["1.2.0", "1.1.0"], [], ""),
        (["1.2.0"], ["v1.2.0", "before-review"], ""),
        (["Unreleased", "1.2.0"], [], "the newest section of CHANGELOG.md is Unreleased, "),
        (["1.1.0", "1.2.0"], [], "the newest section of CHANGELOG.md is 1.1.0, "),
        (["1.2.0"], ["v1.2.0", "v1.1.0"], "the commit has the tag v1.1.0, "),
    ],
)
def test_versions_that_disagree(sections, tags, said):
    changelog = "# Changelog\n\n" + "".join(f"## [{section}] - 2026-11-27\n\n- A change.\n\n" for section in sections)
    found = disagreement(PROJECT, changelog, tags)
    assert found == (said and f"{said}the version in pyproject.toml is 1.2.0")
