"""Functions go by name where they can be found by it, and by value where they cannot."""

import abc
import collections
import enum
import functools
import gc
import importlib
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire._wire.codec import Manner
from gradwire._wire.functions import Names, main_fingerprint, resolve
from gradwire._wire.messages import Call
from gradwire._wire.pickling import PickleSerializer
from gradwire.errors import NotAllowedError
from tests.wire.round_trip import (
    LIMITS,
    PLAIN,
    Codec,
    call_of,
    called,
    received,
)

SAME_MAIN = Manner(same_main=True)


class Counter:
    """Has every kind of method."""

    def __init__(self, start: int) -> None:
        self.count = start

    def step(self, by: int) -> int:
        self.count += by
        return self.count

    @classmethod
    def made(cls) -> "Counter":
        return cls(0)

    @staticmethod
    def one() -> int:
        return 1

    class Inner:
        """Has a name with a dot in it."""


class Special(Counter):
    """Inherits a class method, which is then another one."""


def double(x: Any) -> Any:
    return x * 2


@functools.wraps(double)
def wrapper(x: Any) -> Any:
    return double(x) + 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (double, "tests.wire.test_functions:double"),
        (torch.add, "torch:add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (len, "builtins:len"),
        (dict.fromkeys, "builtins:dict.fromkeys"),
        (collections.OrderedDict, "collections:OrderedDict"),
        (Counter, "tests.wire.test_functions:Counter"),
        (Counter.Inner, "tests.wire.test_functions:Counter.Inner"),
        (Counter.step, "tests.wire.test_functions:Counter.step"),
        (Counter.one, "tests.wire.test_functions:Counter.one"),
        (Counter.made, "tests.wire.test_functions:Counter.made"),
    ],
)
def test_what_can_be_imported_goes_by_name(
    function: Any, name: str, manner: Manner
) -> None:
    assert called(call_of(function), manner).function == name
    assert resolve(name) == function


def closure() -> Callable[[int], int]:
    seen = [10]

    def add(x: int) -> int:
        seen[0] += x
        return seen[0]

    return add


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda x: x * 3, 6),
        (closure(), 12),
        (functools.partial(double, 4), 8),
        (Counter(5).step, 7),
        (Special.made, 0),
        (wrapper, 5),  # its name is that of another function
        (torch.nn.Identity(), 2),
    ],
    ids="lambda closure partial method inherited decorated instance".split(),
)
def test_what_cannot_be_imported_goes_by_value(function: Any, result: Any) -> None:
    arrived = called(call_of(function)).function
    value = arrived() if result in (0, 8) else arrived(2)
    assert (value.count if isinstance(value, Special) else value) == result


def test_a_function_by_value_takes_a_copy_of_its_state() -> None:
    add = closure()
    arrived = called(call_of(add)).function
    assert (arrived(1), arrived(1)) == (11, 12)
    assert add(1) == 11


@pytest.mark.parametrize("function", [lambda: 0, Counter(1).step, wrapper])
def test_a_worker_with_an_allow_list_is_sent_no_functions_by_value(
    function: Any,
) -> None:
    with pytest.raises(NotAllowedError, match="cannot be imported by name"):
        Codec(LIMITS).call(call_of(function), PLAIN)


def test_looking_for_names_keeps_no_closure_alive() -> None:
    function = closure()
    alive = weakref.ref(function)
    names = Names()
    assert names.name_of(function, False) is None
    del function
    gc.collect()
    assert alive() is None


def test_an_unhashable_callable_has_no_name() -> None:
    class Unhashable(dict[str, int]):
        def __call__(self) -> int:
            return self["x"]

    assert called(call_of(Unhashable(x=3))).function() == 3


@pytest.mark.parametrize(
    "name", ["", ":", ":f", "torch", "torch:", "torch:no.such", "no.such:f", ".os:f"]
)
def test_a_name_that_leads_nowhere_is_a_lookup_error(name: str) -> None:
    with pytest.raises(LookupError, match="here"):
        resolve(name)


def test_a_name_leads_to_what_is_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = types.ModuleType("changing"), types.ModuleType("changing")
    first.function, second.function = double, wrapper
    monkeypatch.setitem(sys.modules, "changing", first)
    for _ in range(2):
        assert resolve("changing:function") is double
    first.function = closure
    assert resolve("changing:function") is closure
    del first.function
    with pytest.raises(LookupError, match="no 'function' in module 'changing'"):
        resolve("changing:function")
    monkeypatch.setitem(sys.modules, "changing", second)
    assert resolve("changing:function") is wrapper
    monkeypatch.delitem(sys.modules, "changing")
    with pytest.raises(LookupError, match="no module 'changing'"):
        resolve("changing:function")


def test_a_function_is_found_when_its_module_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the thread that imports the module has looked for the function meanwhile."""
    gate = types.SimpleNamespace(reached=threading.Event(), opened=threading.Event())
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    code = """
        import gate
        from gradwire._wire.functions import resolve
        def function(): return late
        assert resolve("slowly:function") is function
        gate.reached.set()
        assert gate.opened.wait(60)
        late = True
    """
    (tmp_path / "slowly.py").write_text(textwrap.dedent(code))
    with ThreadPoolExecutor(2) as pool:
        importing = pool.submit(importlib.import_module, "slowly")
        assert gate.reached.wait(60)
        running = pool.submit(lambda: resolve("slowly:function")())
        early = wait([running], 0.1).done
        gate.opened.set()
        assert not early
        assert running.result(60) is True
        importing.result(60)
    monkeypatch.delitem(sys.modules, "slowly")


# What the main script defines


def of_main(x: int) -> int:
    return x + 1


class Plain:
    """A class."""


class Colour(enum.Enum):
    """A class with a metaclass, whose members are compared by identity."""

    RED = 1


class Abstract(abc.ABC):  # noqa: B024 it is about its metaclass
    """A class with another metaclass."""


@pytest.fixture(params=["__main__", "__mp_main__"])
def in_main(request: pytest.FixtureRequest) -> Iterator[None]:
    """These names are defined by the main script."""
    main = types.ModuleType(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", main)
        patch.setitem(sys.modules, request.param, main)
        for thing in (of_main, Plain, Colour, Abstract):
            setattr(main, thing.__name__, thing)
            patch.setattr(thing, "__module__", request.param)
        yield


@pytest.mark.usefixtures("in_main")
def test_a_function_of_main_goes_by_name_to_who_runs_the_same_script() -> None:
    assert called(call_of(of_main, 1), SAME_MAIN).function == "__main__:of_main"


@pytest.mark.usefixtures("in_main")
def test_a_function_of_main_goes_by_value_to_who_runs_another_script() -> None:
    arrived = called(call_of(of_main, 1)).function
    assert arrived is not of_main
    assert arrived(1) == 2


@pytest.mark.usefixtures("in_main")
def test_what_main_defines_is_itself_where_the_same_script_runs() -> None:
    sent = [of_main, Plain, Colour.RED, Abstract]
    data = PickleSerializer({}, same_main=True).dumps(sent, [])
    assert b"cloudpickle" not in data  # all by name
    arrived = PickleSerializer({}, same_main=True).loads(data, [])
    assert all(a is b for a, b in zip(arrived, sent, strict=True))


@pytest.mark.usefixtures("in_main")
def test_what_main_defines_goes_by_value_where_another_script_runs() -> None:
    data = PickleSerializer({}, same_main=False).dumps([of_main, Plain()], [])
    assert b"cloudpickle" in data


@pytest.mark.usefixtures("in_main")
def test_what_main_defines_but_no_longer_names_goes_by_value() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "of_main", double)
        assert callable(called(call_of(of_main, 1), SAME_MAIN).function)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_scripted_function_goes_by_the_name_it_was_written_under() -> None:
    assert Names().name_of(scripted, same_main=True) == f"{__name__}:scripted"
    assert resolve(f"{__name__}:scripted") is scripted


# What the main script defines on some workers only


SCRIPT = """
def always(x): return x + 1
if rank == 0:
    def here(x): return always(x) + factor()
    def factor(): return 10
    class Point:
        def __init__(self, x): self.x = x
        def twice(self): return Point(2 * self.x)
    import threading
    lock = threading.Lock()
    def locked(): return lock
joined()
def late(x): return x * 2
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[int], types.ModuleType]]:
    """Makes the main module of a worker current, as it is for that rank."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    modules: dict[int, types.ModuleType] = {}
    with pytest.MonkeyPatch.context() as patch:

        def main_of(rank: int) -> types.ModuleType:
            if rank in modules:
                patch.setitem(sys.modules, "__main__", modules[rank])
                return modules[rank]
            main = modules[rank] = types.ModuleType("__main__")
            patch.setitem(sys.modules, "__main__", main)
            main.__dict__.update(rank=rank, __file__=str(path), joined=main_fingerprint)
            exec(compile(SCRIPT, path, "exec"), vars(main))
            return main

        yield main_of
        patch.undo()
        main_fingerprint()


MainOf = Callable[[int], types.ModuleType]


def across(script: MainOf, func: Any, *args: Any) -> Any:
    """What a function of rank 0 returns on rank 1, which runs the same script."""
    arrived = sent_to(script, call_of(func, *args))
    function = arrived.function
    if isinstance(function, str):
        function = resolve(function)
    result = function(*arrived.args)
    data = PickleSerializer({}, same_main=True).dumps(result, [])
    script(0)
    return PickleSerializer({}, same_main=True).loads(data, [])


def sent_to(script: MainOf, call: Call, rank: int = 1) -> Call:
    """A call from rank 0, as it arrives there."""
    script(0)
    parcel = Codec(LIMITS).call(call, SAME_MAIN)
    script(rank)
    arrived: Call = received(parcel, SAME_MAIN)
    return arrived


def test_a_function_that_only_one_worker_defines_goes_by_value(script: MainOf) -> None:
    assert across(script, script(0).here, 1) == 12


def test_what_all_define_still_goes_by_name(script: MainOf) -> None:
    assert sent_to(script, call_of(script(0).always, 1)).function == "__main__:always"


def test_a_class_that_only_one_worker_defines_is_the_same_when_it_comes_back(
    script: MainOf,
) -> None:
    point = script(0).Point
    back = across(script, point.twice, point(3))
    assert type(back) is point
    assert back.x == 6


def test_what_is_defined_after_joining_is_the_other_workers_own_if_it_has_it(
    script: MainOf,
) -> None:
    own = script(1).late
    call = call_of(script(0).late, 1)
    assert sent_to(script, call).function is own
    del script(1).late
    assert sent_to(script, call).function(4) == 8


def test_it_is_said_why_a_function_cannot_be_sent_by_value(script: MainOf) -> None:
    with pytest.raises(
        LookupError, match=r"'locked' is not defined.*cannot pickle.*lock"
    ):
        across(script, script(0).locked)
