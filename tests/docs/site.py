"""The tools that build the site, docs/tools, as modules."""

import sys

from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))

import pages

__all__ = ["pages"]
