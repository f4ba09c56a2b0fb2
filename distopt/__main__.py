"""`python -m distopt`, for use when the console script is not on the PATH."""

import sys

from .cli import main

sys.exit(main())
