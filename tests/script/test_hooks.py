"""What scripting puts into torch, when, and that it is taken out again."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradwire as gw
from tests.script.functions import add, script
from tests.worlds import scripting_world

ROOT = Path(__file__).parents[2]


def hooks() -> list[object]:
    return [
        torch.jit.frontend.parse_def,
        torch.jit.annotations.try_ann_to_type,
        torch._C._jit_try_infer_type,
        torch.jit._recursive.get_annotations,
        torch.jit._recursive.try_compile_fn,
        torch.jit.load,
    ]


def twice(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", add, (x, x))


def test_enabling_and_disabling_twice_is_fine() -> None:
    before = hooks()
    gw.script.enable()
    gw.script.enable()
    assert all(a is not b for a, b in zip(before, hooks(), strict=True))
    gw.script.disable()
    gw.script.disable()
    assert hooks() == before


def test_what_was_scripted_goes_on_to_work() -> None:
    with scripting_world() as world:
        scripted = script(twice)
        gw.script.disable()
        assert scripted(torch.ones(2)).tolist() == [2, 2]
        assert len(world) == 2


def test_scripts_that_make_no_calls_are_as_before() -> None:
    def plain(x: Tensor) -> Tensor:
        return x.relu() + 1

    before = str(script(plain).graph)
    gw.script.enable()
    try:

        def plain(x: Tensor) -> Tensor:  # type: ignore[no-redef]
            return x.relu() + 1

        assert str(script(plain).graph).split("#")[0] == before.split("#")[0]
    finally:
        gw.script.disable()


@pytest.mark.slow
def test_importing_gradwire_patches_nothing_and_loads_nothing_of_it() -> None:
    code = """
    import sys, torch
    def hooks():
        return [torch.jit.frontend.parse_def, torch.jit.annotations.try_ann_to_type,
                torch._C._jit_try_infer_type, torch.jit.load, set(vars(torch.ops))]
    before = hooks()
    import gradwire as gw
    gw.script, gw.rpc_sync, gw.RemoteModule
    from gradwire.testing import World
    assert hooks() == before
    print([name for name in sys.modules if "gradwire._script" in name])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_a_torch_without_torchscript_says_so() -> None:
    code = """
    import torch
    del torch._C._jit_script_compile, torch.jit._state._python_cu
    torch.jit.frontend.__dict__.pop("build_class_def")
    import gradwire as gw
    try:
        gw.script.enable()
    except RuntimeError as error:
        print(torch.__version__ in str(error), "from Python" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "True True\n", done.stderr


ENDING = """
import threading, warnings
warnings.simplefilter("ignore")
import torch
import gradwire as gw
gw.script.enable()

@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.jit.script
def forks(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(twice, x))

def work():
    forks(torch.ones(2))
    together.wait()

together = threading.Barrier(100)
threads = [threading.Thread(target=work) for _ in range(100)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_a_process_ends_well_right_after_threads_that_ran_scripts(
    tmp_path: Path,
) -> None:
    """Each left a note in its state in torch, which goes with the thread, after Python's join."""
    program = tmp_path / "ending.py"
    program.write_text(ENDING)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(program)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
