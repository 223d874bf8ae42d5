"""Run a command that ends with the launcher: `python die_with_parent.py LAUNCHER COMMAND...`.

A launcher that is killed cannot stop its workers, so they ask the kernel to (Linux). The setting
survives exec. It is made here rather than between fork and exec in the launcher, which has
threads.
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
