"""`cupy.lib`, as far as distopt uses it."""

from . import stride_tricks as stride_tricks
