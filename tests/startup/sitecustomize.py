"""Has the processes that tests start load torch, and end, with two thirds of the usual work.

Python imports this by itself where this folder is in PYTHONPATH. Loading torch makes a million
objects that stay to the end; to look for garbage among them, over and over, takes a third of the
time of a short program.
"""

import atexit
import gc

gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
