"""First on the path of processes that a program with Gradwire in torch's place has started.

Waits for torch to be imported, and then puts Gradwire in its place there, too. Imports nothing
itself: processes that never import torch stay as they are. Another `sitecustomize` further down
the path is run as if this one were not there.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent
_ROOT = str(_HERE.parents[2])


class _Watch(MetaPathFinder):
    """Installs once the first of these is imported; the second imports the first."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in ("torch", "gradwire"):
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _and_install(loader)
        return spec


def _and_install(loader: Loader) -> Callable[[ModuleType], None]:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        if _ROOT not in sys.path:
            sys.path.append(_ROOT)
        from gradwire.compat import install

        install()

    return exec_module


def _run_the_next() -> None:
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, _Watch())
_run_the_next()
