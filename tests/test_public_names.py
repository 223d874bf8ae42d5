"""`__all__` of every public package is sorted, and is exactly what is there.

A package is public where its `__init__` assigns `__all__`. It may import modules
freely; any other name that it only uses itself needs an underscore.
"""

import __future__

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1] / "src"


def public_packages() -> list[str]:
    return [
        ".".join(path.parent.relative_to(SOURCE).parts)
        for path in sorted(SOURCE.rglob("__init__.py"))
        if assigns_all(path)
    ]


def assigns_all(path: Path) -> bool:
    return any(
        isinstance(node, ast.Name)
        and node.id == "__all__"
        and isinstance(node.ctx, ast.Store)
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.fixture(params=public_packages())
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_the_root_is_public() -> None:
    assert "gradwire" in public_packages()


def test_all_is_sorted_and_names_nothing_twice(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(set(package.__all__))


def test_every_name_in_all_exists(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_every_public_name_is_in_all(package: ModuleType) -> None:
    not_ours = (ModuleType, __future__._Feature)
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, not_ours)
    }
    assert public - set(package.__all__) == set()


def test_names_are_looked_up_once(package: ModuleType) -> None:
    """To look for a name elsewhere takes a tenth of a small call."""
    for name in package.__all__:
        getattr(package, name)
    assert [name for name in package.__all__ if name not in vars(package)] == []
