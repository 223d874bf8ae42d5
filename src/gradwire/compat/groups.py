"""`torch.distributed.destroy_process_group`, after which a program may go on at once.

A group of gloo ends with its last user, often a DistributedDataParallel that goes out of scope. Its
end waits for the group's threads and holds Python's lock meanwhile; a thread that just lets go of
the tensor of a finished operation waits for that lock. So a program that ends soon after its last
operation hangs now and then, in torch alone, too. The last few groups are kept here for a while:
when they go, their threads have long been idle.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import distributed

_kept: deque[Any] = deque(maxlen=4)
_destroy = distributed.destroy_process_group


def destroy_process_group(group: Any = None) -> None:
    """End a process group; without one, all of them."""
    _kept.append(distributed.group.WORLD if group is None else group)
    _destroy(group)
