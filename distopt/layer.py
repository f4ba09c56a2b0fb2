"""SINGA's `layer` module, under the name that scripts import: `distopt.singa.layer`."""

import sys

from .singa import layer
from .singa.layer import *  # noqa: F403 - for type checkers

sys.modules[__name__] = layer
