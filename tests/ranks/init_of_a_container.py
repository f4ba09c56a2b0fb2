"""Process 1 of a container: runs a program, waits for all that it has started, and ends as it has ended."""

import os
import sys

pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
codes = {}
while True:
    try:
        ended, status = os.wait()
    except ChildProcessError:
        break
    codes[ended] = status
code = os.waitstatus_to_exitcode(codes[pid])
sys.exit(code if code >= 0 else 128 - code)
