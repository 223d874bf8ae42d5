"""`__all__` of every public module is sorted, and is exactly what is there.

A package or top-level module is public where it assigns `__all__`. It may import
modules freely; any other name that it only uses itself needs an underscore.
"""

import __future__

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1] / "src"


def public_modules() -> list[str]:
    return [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in sorted({*SOURCE.rglob("__init__.py"), *SOURCE.glob("*/*.py")})
        if assigns_all(path)
    ]


def assigns_all(path: Path) -> bool:
    return any(
        isinstance(node, ast.Name)
        and node.id == "__all__"
        and isinstance(node.ctx, ast.Store)
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.fixture(params=public_modules())
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_the_root_is_public() -> None:
    assert "gradwire" in public_modules()


def test_all_is_sorted_and_names_nothing_twice(module: ModuleType) -> None:
    assert list(module.__all__) == sorted(set(module.__all__))


def test_every_name_in_all_exists(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_every_public_name_is_in_all(module: ModuleType) -> None:
    not_ours = (ModuleType, __future__._Feature)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, not_ours)
    }
    assert public - set(module.__all__) == set()


def test_names_are_looked_up_once(module: ModuleType) -> None:
    """To look for a name elsewhere takes a tenth of a small call."""
    for name in module.__all__:
        getattr(module, name)
    assert [name for name in module.__all__ if name not in vars(module)] == []


def test_the_names_of_the_root_are_what_its_imports_say() -> None:
    """They are imported on first use; its imports are for those who read types."""
    code = ast.parse((SOURCE / "gradwire" / "__init__.py").read_text())
    found = {
        alias.name: node.module
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    root = importlib.import_module("gradwire")
    assert found.keys() == set(root.__all__) - {"__version__"}
    for name, origin in found.items():
        home = importlib.import_module(f"gradwire.{origin or name}")
        assert getattr(root, name) is (getattr(home, name) if origin else home)


def test_the_root_imports_its_modules_on_use_and_nothing_before() -> None:
    program = (
        "import sys, gradwire\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(gradwire, 'absent')\n"
        "assert gradwire.errors.ClosedError is gradwire.ClosedError\n"
        "assert 'init_rpc' in dir(gradwire)\n"
        "assert gradwire.testing.World\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
