"""Run a command that ends with the launcher: `python die_with_parent.py LAUNCHER COMMAND...`.

A launcher that is killed cannot end its workers, so they ask the kernel (Linux) to. The wish is
kept when this process becomes the command. Done here, not between fork and exec in the launcher,
which has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):  # else it is dead already
        os.execvp(sys.argv[2], sys.argv[2:])
