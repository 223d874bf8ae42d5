"""The shape of the source tree: who may import whom, private torch names, sizes.

Reads the source with `ast` and imports none of it, so that imports inside functions
and under TYPE_CHECKING count like any other.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

MAX_FILE_LINES = 520  # a class is not cut over files to stay below it
MAX_FUNCTION_LINES = 40  # of code: no blank lines, comments or docstring

RANKS = {
    name: rank
    for rank, names in enumerate(
        [
            "errors ids options events cores tracebacks uncompiled streams",
            "locks",
            "threads",
            "_wire",
            "_transport",
            "_rpc",
            "_rref",
            "_autograd",
            "worker",
            "retries",
            "api",
            "rpc autograd local _script",
            "fanout script serving",
            "optim",
            "nn",
            "checkpoint",
            "training_loop",
            "launch tools testing ray",
            "compat",
        ]
    )
    for name in names.split()
}

ROOT = "gradwire"
# These bring everything together, so they may import anything.
ENTRIES = {ROOT, f"{ROOT}.__main__"}

# Module: why no public name does.
PRIVATE_TORCH: dict[str, str] = {
    "gradwire.uncompiled": "the compiler's switch for code, without loading the compiler",
    "gradwire._autograd.device_queues": "the device of what a node made",
    "gradwire._autograd.engine": "the engine without 10 µs of checks; is the profiler on",
    "gradwire._autograd.hooks": "the hooks of a tensor",
    "gradwire._autograd.node_order": "which node the engine runs next",
    "gradwire._autograd.nodes": "applying a Function without what transforms need",
    "gradwire._rpc.futures": "errors that are raised as they are at each look",
    "gradwire._script.compiler": "compiles TorchScript that was written as text",
    "gradwire._script.hooks": "the compiler's own names for what it parses, infers and loads",
    "gradwire._script.parts": "types of TorchScript, taken apart",
    "gradwire._script.pickling": "lists and dicts that scripts share by reference",
    "gradwire._script.references": "classes of RRef[T], by type",
    "gradwire._script.remote_modules": "the methods of a TorchScript interface",
    "gradwire._script.rewriting": "what the names in a function stand for",
    "gradwire._script.scope": "objects in torch's thread-local state, which scripts carry on",
    "gradwire._script.targets": "scripted functions, by name",
    "gradwire._script.types": "types of TorchScript as annotations",
    "gradwire.compat.installing": "the compiler has imported RRef by now",
    "gradwire.compat.rpc.profiling": "when a call counts as ended; events of other workers",
    "gradwire.compat.rpc.scripts": "which functions are operators, under which names",
    "gradwire.compat.rpc.starting": "what init_rpc does in a world without a size",
    "gradwire._wire.tensor_kinds": "quantized tensors from their stored integers",
}

# Modules of torch's: what counts is which of the names in them is used where.
PRIVATE_NAMESPACES = {"_C", "_builtins", "_jit_internal", "_state"}

PRIVATE_PYTHON = {"_DummyThread", "_exit", "_getframe", "_initializing", "_is_owned"}

SOURCE = Path(__file__).parents[1] / "src" / ROOT


# Reading the tree


@cache
def sources() -> dict[str, Path]:
    """Every module of ours, by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that a module imports."""
    is_package = sources()[module].name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    return frozenset(imported_by(tree(module), package, set(sources())))


def imported_by(code: ast.AST, package: str, known: set[str]) -> Iterator[str]:
    """Our modules that this code, standing in `package`, imports.

    `from x import y` imports `x.y` where that is a module, and `x` otherwise.
    """
    for node in ast.walk(code):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, package)
            members = [f"{origin}.{alias.name}" for alias in node.names]
            names = [member if member in known else origin for member in members]
        yield from (name for name in names if name.split(".")[0] == ROOT)


def absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def private_torch_names(code: ast.AST) -> Iterator[str]:
    """Dotted names below torch with a part that starts with a single underscore."""
    stands_for = {"torch": "torch"}  # the names of this file, written out
    names = []
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            stands_for |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            members = {
                a.asname or a.name: f"{node.module}.{a.name}" for a in node.names
            }
            names += members.values()
            stands_for |= members
    for node in ast.walk(code):
        head, *rest = dotted(node).split(".")
        names.append(".".join([stands_for.get(head, ""), *rest]))
    return filter(is_private_torch, names)


def foreign_private_names(code: ast.AST) -> Iterator[str]:
    """Private names that are asked of some object, and that no code of ours gives to one.

    `super(Class, ...)` steps past what a class of torch does: that counts, too.
    """
    asked = {"getattr", "setattr", "hasattr", "delattr"}
    for node in ast.walk(code):
        name = node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = [ast.unparse(argument) for argument in node.args[:2]]
            if node.func.id == "super" and len(arguments) == 2:
                yield f"super({arguments[0]})"
            elif node.func.id in asked and len(arguments) == 2:
                name = arguments[1].strip("'\"")
        if name.startswith("_") and not name.startswith("__"):
            yield name


def own_names(code: ast.AST) -> Iterator[str]:
    """The names that this code defines or stores."""
    for node in ast.walk(code):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if dotted(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and "__slots__" in map(dotted, node.targets):
            constants = filter(lambda n: isinstance(n, ast.Constant), ast.walk(node))
            yield from (str(constant.value) for constant in constants)


@cache
def all_own_names() -> frozenset[str]:
    return frozenset(name for module in sources() for name in own_names(tree(module)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, and nothing for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_private_torch(name: str) -> bool:
    head, *rest = name.split(".")
    return head == "torch" and any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )


def others(module: str) -> set[str]:
    """Private names that must be torch's: neither ours nor Python's."""
    return {*foreign_private_names(tree(module))} - all_own_names() - PRIVATE_PYTHON


def functions(code: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(code):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> int:
    has_docstring = ast.get_docstring(function) is not None
    docstring = line_numbers(function.body[0]) if has_docstring else range(0)
    kept = (lines[n - 1].strip() for n in line_numbers(function) if n not in docstring)
    return sum(bool(line) and not line.startswith("#") for line in kept)


def line_numbers(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


# The rule


def rank(module: str) -> int:
    return RANKS[folder(module)]


def folder(module: str) -> str:
    return module.split(".")[1]


def is_allowed(importer: str, imported: str) -> bool:
    if importer in ENTRIES:
        return True
    if imported == ROOT:
        return rank(importer) > RANKS["checkpoint"]  # the root re-exports all up to it
    if folder(importer) == folder(imported):
        return True
    return rank(imported) < rank(importer)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("gradwire._wire.frames", "gradwire.errors", True),
        ("gradwire._wire.frames", "gradwire._wire.limits", True),
        ("gradwire._wire.frames", "gradwire._transport.base", False),
        ("gradwire.ids", "gradwire.errors", False),
        ("gradwire.tools.bench", "gradwire.testing.world", False),
        ("gradwire.tools.bench", "gradwire", True),
        ("gradwire.api", "gradwire", False),
        ("gradwire.rpc", "gradwire.api", True),
        ("gradwire.rpc", "gradwire.optim", False),
        ("gradwire._rpc.agent", "gradwire.api", False),
        ("gradwire._rpc.agent", "gradwire.rpc", False),
        ("gradwire.worker", "gradwire.rpc", False),
        ("gradwire.worker", "gradwire._rpc.agent", True),
        ("gradwire.optim.step", "gradwire.rpc", True),
        ("gradwire.__main__", "gradwire.compat", True),
    ],
)
def test_the_rule_is_the_one_we_mean(
    importer: str, imported: str, *, allowed: bool
) -> None:
    assert is_allowed(importer, imported) is allowed


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import gradwire._rpc.agent", "gradwire._rpc.agent"),
        ("from gradwire._rpc import agent", "gradwire._rpc.agent"),
        ("from gradwire.rpc import rpc_sync", "gradwire.rpc"),
        ("from . import agent", "gradwire._rpc.agent"),
        ("from .agent import Agent", "gradwire._rpc.agent"),
        ("from .. import errors", "gradwire.errors"),
        ("from ..errors import ClosedError", "gradwire.errors"),
        ("if TYPE_CHECKING:\n    import gradwire.errors", "gradwire.errors"),
        ("def f():\n    import gradwire.errors", "gradwire.errors"),
        ("import gradwires, torch", None),
    ],
)
def test_an_import_is_found_however_it_is_written(line: str, found: str | None) -> None:
    known = {"gradwire", "gradwire.rpc", "gradwire._rpc.agent", "gradwire.errors"}
    names = list(imported_by(ast.parse(line), "gradwire._rpc", known))
    assert names == ([found] if found else [])


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch._C import _functions",
        "from torch.distributed import _x",
        "import torch.distributed as d; d._x()",
        "from torch import nn; nn._x",
        "torch._C._distributed_rpc.f",
    ],
)
def test_a_private_torch_name_is_found_however_it_is_written(line: str) -> None:
    assert list(private_torch_names(ast.parse(line)))


@pytest.mark.parametrize("line", ["torch.ones.__name__", "torch.ones(self._x)", "x._C"])
def test_other_names_are_not_taken_for_private_torch(line: str) -> None:
    assert not list(private_torch_names(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["node._number()", "getattr(x, '_number', None)", "super(Function, made).apply"],
)
def test_a_private_name_of_others_is_found(line: str) -> None:
    assert list(foreign_private_names(ast.parse(line)))


# The tree


def test_every_module_and_folder_has_a_rank() -> None:
    names = {folder(module) for module in sources() if module not in ENTRIES}
    assert names - RANKS.keys() == set()


def test_modules_import_lower_ranks_and_their_own_folder_only() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in sources()
        for imported in sorted(imports(module))
        if not is_allowed(module, imported)
    ]
    assert wrong == []


def test_the_design_page_has_these_ranks() -> None:
    page = (SOURCE.parents[1] / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(.*?)` \|", page, re.M)
    assert {name: int(rank) for rank, names in rows for name in names.split()} == RANKS


def test_no_imports_form_a_cycle() -> None:
    try:
        TopologicalSorter({module: imports(module) for module in sources()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])), pytrace=False)


def test_private_torch_names_stand_only_where_listed() -> None:
    found = {
        module: names
        for module in sources()
        if (names := sorted({*private_torch_names(tree(module)), *others(module)}))
    }
    unlisted = {m: names for m, names in found.items() if m not in PRIVATE_TORCH}
    assert unlisted == {}
    assert PRIVATE_TORCH.keys() - found.keys() == set(), "listed for nothing"


def test_each_private_torch_name_stands_in_one_module() -> None:
    users: dict[str, set[str]] = {}
    for module in sources():
        for name in {*private_torch_names(tree(module)), *others(module)}:
            last = name.rpartition(".")[2]
            if last.startswith("_") and last not in PRIVATE_NAMESPACES:
                users.setdefault(last, set()).add(module)
    assert len(users) > 20
    assert {n: sorted(found) for n, found in users.items() if len(found) > 1} == {}


def test_files_and_functions_stay_small() -> None:
    large = []
    for module, path in sources().items():
        lines = path.read_text().splitlines()
        if len(lines) > MAX_FILE_LINES:
            large.append(f"{module}: {len(lines)} lines")
        for function in functions(tree(module)):
            if (size := code_lines(function, lines)) > MAX_FUNCTION_LINES:
                large.append(f"{module}.{function.name}: {size} lines of code")
    assert large == []


# Locks

KINDS_OF_LOCKS = {"Lock", "RLock", "OwnedLock", "CheckedLock", "Condition", "Semaphore"}


def makes_lock(node: ast.AST) -> bool:
    """Whether this expression is `threading.Lock()`, say."""
    return (
        isinstance(node, ast.Call)
        and not node.args
        and ast.unparse(node.func).rpartition(".")[2] in KINDS_OF_LOCKS
    )


def locks_made(module: str) -> Iterator[tuple[str, set[str]]]:
    """For each lock that a module makes: of which class it is, or else of which module.

    And the names in the statement that makes it, of which one is the lock's.
    """

    def look(node: ast.AST, owner: str) -> Iterator[tuple[str, set[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from look(child, child.name)
            elif isinstance(child, ast.Assign | ast.Return) and any(
                map(makes_lock, ast.walk(child))
            ):
                yield owner, set(re.findall(r"\w+", ast.unparse(child)))
            else:
                yield from look(child, owner)

    yield from look(tree(module), module.rpartition(".")[2])


def locks_in_the_table() -> set[str]:
    """`Class.name` or `module.name` of each; one without a dot is of the one before it."""
    page = (SOURCE.parents[1] / "docs" / "design.md").read_text()
    table = page.partition("\n## Locks\n")[2].partition("\n## ")[0]
    found = set()
    for row in re.findall(r"^\| (`.*?`) \|", table, re.M):
        owner = ""
        for name in re.findall(r"`(.*?)`", row):
            owner = name.rpartition(".")[0] or owner
            found.add(f"{owner}.{name.rpartition('.')[2]}")
    return found


def test_the_design_page_has_every_lock_and_no_other() -> None:
    listed = locks_in_the_table()
    unlisted, used = [], set()
    for module in sources().keys() - ENTRIES:
        if module == f"{ROOT}.locks" or folder(module) == "tools":
            continue  # the kinds of locks; the programs that the benchmarks measure
        for owner, names in locks_made(module):
            entries = {f"{owner}.{name}" for name in names} & listed
            used |= entries
            if not entries:
                unlisted.append(f"{module}: {owner}")
    assert unlisted == []
    assert listed - used == set(), "listed for nothing"
