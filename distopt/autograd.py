"""SINGA's `autograd` module, under the name that scripts import: `distopt.singa.autograd`."""

import sys

from .singa import autograd
from .singa.autograd import *  # noqa: F403 - for type checkers

sys.modules[__name__] = autograd
