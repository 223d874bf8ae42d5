"""Rewrites the calls in a function that is about to be scripted.

    rpc_async(to, f, (a, b), kwargs, timeout)

becomes, with functions that `calls.py` generates,

    rpc_async_f(to, arguments_f(a, b), kwargs, timeout)

TorchScript has no values that are functions, so `f` has to be a name that is known when the script
is compiled, as it has to be with torch's own RPC. Names are looked up as Python would; those that
the function itself assigns are left alone. New nodes stand where the call stood, for error
messages. What cannot be called is refused only when the compiler comes to it: it leaves out the
branches that are for Python, such as the other side of `if torch.jit.is_scripting()`.

A future that Python passes in holds an object of Python, of which a script can make nothing: so a
function that takes a `Future[T]` begins by making one of its own of it.

Private torch names: `torch._jit_internal.get_closure`, what a function's names stand for.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._jit_internal import get_closure
from torch.jit.frontend import NotSupportedError

from . import calls, compiler, frontends

_PARAMETERS = ("to", "func", "args", "kwargs", "timeout")
_SWITCHING = torch.jit.fork, torch.jit._fork, torch.jit.wait, torch.jit._wait

_under_way: list[Any] = []
"""The functions of Python that are being compiled, because others call them."""


def rewrite(function: Any, parsed: Any) -> None:
    """Rewrite what `parse_def` has made of a function, in place."""
    definition = parsed.ast.body[0]
    names = _Names(function, definition)
    rewriter = _Calls(names, parsed.ctx)
    definition.body = [rewriter.visit(statement) for statement in definition.body]
    first = definition.body[0]
    for argument in _arguments(definition):
        typed = names.inner(argument.annotation, torch.futures.Future)
        if typed is not None:
            definition.body.insert(0, _retyped(argument.arg, typed, first))
        argument.annotation = _annotated(names, argument.annotation)
    definition.returns = _annotated(names, definition.returns)
    if rewriter.may_switch:
        definition.body.insert(0, _note(first))


def _arguments(definition: ast.FunctionDef) -> list[ast.arg]:
    return [*definition.args.args, *definition.args.kwonlyargs]


class _Names:
    """What names stand for in a function."""

    def __init__(self, function: Any, definition: ast.FunctionDef) -> None:
        self.known: dict[str, Any] = get_closure(function)
        self._own = {argument.arg for argument in _arguments(definition)}
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._own.add(node.id)

    def find(self, node: ast.expr) -> Any:
        """The object that `a` or `a.b.c` is; None if that is not known."""
        if isinstance(node, ast.Attribute):
            return getattr(self.find(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self._own:
            return None
        return self.known.get(node.id, getattr(builtins, node.id, None))

    def inner(self, annotation: ast.expr | None, *kinds: Any) -> Any:
        """T, where an annotation is `kind[T]` for one of these; None if not, or not known yet."""
        if not isinstance(annotation, ast.Subscript):
            return None
        if self.find(annotation.value) not in kinds:
            return None
        code = compile(
            ast.Expression(copy.deepcopy(annotation)), "<annotation>", "eval"
        )
        try:
            (found,) = typing.get_args(eval(code, dict(self.known)))
        except NameError:  # in quotes, or not there yet: the compiler will say
            return None
        return found


class _Calls(ast.NodeTransformer):
    """Rewrites calls and annotations; notes whether the script may change threads."""

    def __init__(self, names: _Names, context: Any) -> None:
        self._names = names
        self._context = context
        self.may_switch = False

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = _annotated(self._names, node.annotation)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        waited = _waited_call(node)
        found = None if waited is None else self._found(waited)
        if waited is not None and found is not None and found[1] == "rpc_async":
            self.generic_visit(waited)
            return self._call(waited, found[0], "rpc_sync")
        self.generic_visit(node)
        found = self._found(node)
        if found is None:
            function = self._names.find(node.func)
            is_wait = getattr(node.func, "attr", "") == "wait"  # of some future
            self.may_switch |= is_wait or any(function is one for one in _SWITCHING)
            return node
        return self._call(node, *found)

    def _found(self, node: ast.Call) -> tuple[str, str] | None:
        return frontends.find(self._names.find(node.func))

    def _call(self, node: ast.Call, frontend: str, way: str) -> ast.AST:
        given = self._given(node)
        if given is None:
            return self._refused(node, f"takes {', '.join(_PARAMETERS)}")
        function = self._names.find(given["func"])
        if isinstance(function, torch.jit.ScriptFunction):
            packer = calls.arguments_of(function)
            caller = calls.calling(frontend, way, function)
        elif inspect.isfunction(function):
            why = "it is a Python function: decorate it with @torch.jit.script"
            refusal = self._refusal(node, _cannot_call(given["func"], why))
            script = partial(_scripted, function, refusal)
            packer, caller = calls.refused(frontend, way, script)
        else:
            why = "name a scripted function that is known when the script is compiled"
            return self._refused(node, _cannot_call(given["func"], why))
        packed = ast.Call(_helper(packer), _positional(given.get("args")), [])
        kwargs = given.get("kwargs", ast.Constant(None))
        if isinstance(kwargs, ast.Dict) and all(map(_is_text, kwargs.keys)):
            pairs = zip(kwargs.keys, kwargs.values, strict=True)
            packed.keywords = [ast.keyword(key.value, value) for key, value in pairs]  # type: ignore[union-attr]
            kwargs = ast.Constant(None)
        timeout = given.get("timeout")
        if timeout is None or _is_none(timeout):
            timeout = ast.Constant(-1.0)
        timeout = ast.Call(ast.Name("float", ast.Load()), [timeout], [])
        arguments = [given["to"], packed, kwargs, timeout]
        placed: ast.AST = _placed(ast.Call(_helper(caller), arguments, []), node)
        return placed

    def _given(self, node: ast.Call) -> dict[str, ast.expr] | None:
        """The arguments of a call, by parameter; None if it does not take them."""
        keywords = {keyword.arg or "**": keyword.value for keyword in node.keywords}
        given = dict(zip(_PARAMETERS, node.args, strict=False)) | keywords
        is_fit = {"to", "func"} <= given.keys() <= set(_PARAMETERS)
        is_whole = len(given) == len(node.args) + len(node.keywords)
        return given if is_fit and is_whole else None

    def _refused(self, node: ast.Call, why: str) -> ast.AST:
        """An expression that the compiler rejects if it comes to it."""
        helper = _helper(calls.error(self._refusal(node, why)))
        placed: ast.AST = _placed(ast.Call(helper, [], []), node)
        return placed

    def _refusal(self, node: ast.Call, why: str) -> Callable[[], Exception]:
        """Makes the error."""
        start = node.col_offset
        where = self._context.make_range(node.lineno, start, start + 1)
        return partial(NotSupportedError, where, f"{ast.unparse(node.func)} {why}")


def _scripted(function: Any, refusal: Callable[[], Exception]) -> Any:
    """A function of Python as a script.

    Raises:
        Exception: that of `refusal`: it cannot be one, or calls itself, maybe by others.
    """
    with compiler.lock:
        if function in _under_way:
            raise refusal()
        _under_way.append(function)
        try:
            return compiler.script(function)
        except Exception:  # noqa: BLE001 any code
            raise refusal() from None
        finally:
            _under_way.pop()


def _cannot_call(named: ast.expr, why: str) -> str:
    return f"cannot call {ast.unparse(named)!r} from a script: {why}"


def _annotated(names: _Names, node: Any) -> Any:
    """An annotation with every `RRef[T]` in it written as the class it is in TorchScript.

    The compiler resolves most forms by itself (`hooks.py`), but not, for one, `RRef[T] | None`.
    """
    return node if node is None else _Annotations(names).visit(node)


class _Annotations(ast.NodeTransformer):
    def __init__(self, names: _Names) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        inner = self._names.inner(node, *frontends.references())
        if inner is None:
            return self.generic_visit(node)
        placed: ast.AST = _placed(_helper(calls.reference(inner)), node)
        return placed


def _waited_call(node: ast.Call) -> ast.Call | None:
    """The call in `call(...).wait()`."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "wait":
        inner = function.value
        if isinstance(inner, ast.Call) and not node.args and not node.keywords:
            return inner
    return None


def _positional(args: ast.expr | None) -> list[ast.expr]:
    if args is None:
        return []
    if isinstance(args, (ast.Tuple, ast.List)):
        return args.elts
    return [ast.Starred(args, ast.Load())]


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _helper(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _retyped(name: str, inner: Any, before: ast.stmt) -> Any:
    made = ast.Call(
        _helper(calls.typed_future(inner)), [ast.Name(name, ast.Load())], []
    )
    return _placed(ast.Assign([ast.Name(name, ast.Store())], made), before)


def _note(before: ast.stmt) -> Any:
    return _placed(ast.Expr(ast.Call(_helper(calls.note()), [], [])), before)


def _placed(new: Any, old: ast.AST) -> Any:
    """The same, where the old one stands in the source."""
    for node in ast.walk(new):
        if isinstance(node, (ast.expr, ast.stmt, ast.keyword)) and not hasattr(
            node, "lineno"
        ):
            ast.copy_location(node, old)
    return new
