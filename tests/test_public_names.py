"""`__all__` of every public module is sorted, and is exactly what is there.

A package or top-level module is public where it assigns `__all__`. It may import
modules freely; any other name that it only uses itself needs an underscore.
"""

import __future__

import ast
import importlib
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
