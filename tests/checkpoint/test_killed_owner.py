"""An owner that is killed while a checkpoint is saved is missed at once.

The watch for life on one host takes 60 s to miss a worker, longer than a test may take: a test that
ends has seen the connection end.
"""

import os
import signal
from pathlib import Path

import pytest
from torch import nn

import gradwire as gw


class Mortal(nn.Linear):
    """Kills its process when it is asked for its parameters once more than this."""

    def __init__(self, lives: int) -> None:
        super().__init__(2, 2)
        self.lives = lives
        self.register_state_dict_pre_hook(Mortal.age)

    def age(self, *_: object) -> None:
        self.lives -= 1
        if self.lives < 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_save_ends_when_an_owner_is_killed(tmp_path: Path) -> None:
    with gw.local_world(3):
        model = nn.ModuleList(
            [
                gw.nn.RemoteModule("worker1", Mortal, (1,)),
                gw.nn.RemoteModule("worker2", nn.Linear, (2, 2)),
            ]
        )
        with pytest.raises(gw.WorkerLostError, match="worker1"):
            gw.save(tmp_path, model)
        assert not list(tmp_path.glob("save-*"))  # nothing is left of it
        del model
