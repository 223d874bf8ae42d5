"""Puts the modules of this folder where programs look for torch's.

What is imported already is replaced, what is not will be found here when it is (`_Finder`). No
thread or socket is started, so that programs can fork. Processes that are started later find a
`sitecustomize` first on their path (`boot/`), which does the same there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = "gradwire.compat"
_DISTRIBUTED = "torch.distributed"
_RPC = f"{_DISTRIBUTED}.rpc"
_PARTS = "api backend_registry constants functions internal options _testing".split()
_CORE = "torch._C"

MODULES = {
    f"{_DISTRIBUTED}.autograd": f"{_HERE}.autograd",
    _RPC: f"{_HERE}.rpc",
    **{f"{_RPC}.{part}": f"{_HERE}.rpc.{part}" for part in _PARTS},
    f"{_DISTRIBUTED}.optim.optimizer": f"{_HERE}.optimizer",
    f"{_DISTRIBUTED}.nn.api.remote_module": f"{_HERE}.remote_module",
    f"{_CORE}._distributed_rpc": f"{_HERE}.rpc.core",
    f"{_CORE}._distributed_autograd": f"{_HERE}.autograd",
}
"""By the name that programs use, what they get."""

_BOOT = str(Path(__file__).parent / "boot")
_installed = False


def install() -> None:
    """Put Gradwire behind `torch.distributed.rpc`, `.autograd`, `.optim` and `.nn`.

    In this process, and in all that it starts from now on. Call it first: what a program has
    imported from those modules before stays torch's. Idempotent.

    Raises:
        RuntimeError: the program has imported some of it already; says which module has.
    """
    global _installed
    if _installed:
        return
    from .. import RRef  # noqa: F401 all of ours, with torch's names as torch has them

    _refuse_if_late()
    _replace_modules()
    _replace_names()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _BOOT not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_BOOT, *filter(None, paths)])
    _installed = True


def _refuse_if_late() -> None:
    ours = [sys.modules[name] for name in MODULES if name in sys.modules]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "gradwire"):
            continue
        held = [v for v in list(vars(module).values()) if isinstance(v, ModuleType)]
        if any(value is old for value in held for old in ours):
            raise RuntimeError(
                f"module {name!r} has imported torch.distributed.rpc or .autograd already: "
                "call gradwire.compat.install() before that, or use `python -m gradwire run`"
            )


def _replace_modules() -> None:
    for name in [n for n in sys.modules if n.startswith(f"{_RPC}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    for name, ours in MODULES.items():
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and child != "_testing":  # else when it is imported
            module = sys.modules[name] = importlib.import_module(ours)
            setattr(sys.modules[parent], child, module)


def _replace_names() -> None:
    """What torch has imported from there itself."""
    import torch

    from . import futures, groups
    from .rpc import RRef, profiling, scripting

    replaced = [
        (torch._jit_internal, "RRef", RRef),
        (torch._jit_internal, "PyRRef", RRef),
        (torch.jit.annotations, "RRef", RRef),
        (torch.nn.parallel.distributed, "RRef", RRef),
        (torch.futures, "wait_all", futures.wait_all),
        (torch.distributed, "destroy_process_group", groups.destroy_process_group),
    ]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    for package, part in (("optim", "optimizer"), ("nn", "api.remote_module")):
        name = f"{_DISTRIBUTED}.{package}"
        if name in sys.modules:  # and so has imported torch's own
            module = sys.modules[f"{name}.{part}"]
            for public in module.__all__:
                setattr(sys.modules[name], public, getattr(module, public))
    profiling.install()
    scripting.install()


class _Finder(MetaPathFinder):
    """Finds our modules under torch's names."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, _Ours())
        if fullname.startswith(f"{_RPC}."):
            raise ModuleNotFoundError(
                f"{fullname} is not available: Gradwire replaces "
                f"{_RPC} (docs/migrate.md lists what it has)",
                name=fullname,
            )
        return None


class _Ours(Loader):
    """A module of ours, as it is."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
