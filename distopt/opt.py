"""SINGA's `opt` module, under the name that scripts import: `distopt.singa.opt`."""

import sys

from .singa import opt
from .singa.opt import *  # noqa: F403 - for type checkers

sys.modules[__name__] = opt
