"""What importing Gradwire leaves behind in the process: nothing in torch."""

import subprocess
import sys

PROGRAM = """
import importlib, sys
import torch
for name in {names}:
    importlib.import_module(name)

def snapshot():
    found = {{}}
    for name in {names}:
        for key, value in vars(sys.modules[name]).items():
            if not isinstance(value, type(sys)):
                found[name, key] = id(value)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for member, held in list(vars(value).items()):
                    found[name, key, member] = id(held)
    return found

before = snapshot()
import gradwire
import gradwire.optim, gradwire.nn, gradwire.checkpoint, gradwire.testing
after = snapshot()
changed = [key for key in after if after[key] != before.get(key)]
print(changed)
"""
LOADED = """
import sys
import gradwire
import gradwire.optim, gradwire.nn, gradwire.checkpoint, gradwire.testing
print([name for name in sys.modules if name.split(".")[0] == "torch"])
"""


def said_by(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_it_changes_nothing_of_torch() -> None:
    names = said_by(LOADED)
    assert "torch.autograd.function" in names
    assert said_by(PROGRAM.format(names=names)) == "[]"
