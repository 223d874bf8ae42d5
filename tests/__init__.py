"""The environment of the tests and of the processes that they start: before torch is loaded."""

import os
import signal
from pathlib import Path

# Tests run beside each other, and OpenMP's threads spin while they wait. The environment, and not
# torch.set_num_threads, which is for one thread only.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_PATHS = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

# A shell has what it starts in the background ignore Ctrl-C, and all that this starts, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
