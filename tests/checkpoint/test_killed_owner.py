"""An owner that is killed while a checkpoint is saved is missed at once."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import nn

import gradwire as gw

AT_ONCE = 3.0
"""Far more than it takes (0.06 s), and less than it took where the save looked at intervals."""


class Mortal(nn.Linear):
    """Kills its process when it is asked for its parameters once more than this."""

    def __init__(self, lives: int, obituary: Path) -> None:
        super().__init__(2, 2)
        self.lives = lives
        self.obituary = obituary
        self.register_state_dict_pre_hook(Mortal.age)

    def age(self, *_: object) -> None:
        self.lives -= 1
        if self.lives < 0:
            self.obituary.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_save_ends_when_an_owner_is_killed(tmp_path: Path) -> None:
    obituary = tmp_path / "obituary"
    with gw.local_world(3):
        model = nn.ModuleList(
            [
                gw.nn.RemoteModule("worker1", Mortal, (1, obituary)),
                gw.nn.RemoteModule("worker2", nn.Linear, (2, 2)),
            ]
        )
        with pytest.raises(gw.WorkerLostError, match="worker1"):
            gw.save(tmp_path, model)
        assert time.monotonic() - float(obituary.read_text()) < AT_ONCE
        assert not list(tmp_path.glob("save-*"))  # nothing is left of it
        del model
