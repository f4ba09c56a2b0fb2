"""SINGA's `model` module, under the name that scripts import: `distopt.singa.model`."""

import sys

from .singa import model
from .singa.model import *  # noqa: F403 - for type checkers

sys.modules[__name__] = model
