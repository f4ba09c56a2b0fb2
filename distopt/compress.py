"""The former name of `distopt.codecs`."""

from .codecs import *  # noqa: F403
from .codecs import __all__  # noqa: F401
