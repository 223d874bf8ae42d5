"""References in scripts: taken, returned, held, and let go of."""

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire import RRef
from gradwire.testing import World
from tests.script import functions as here
from tests.script.functions import add, script

ONES = torch.ones(2)


class Held(NamedTuple):
    rref: RRef[Tensor]
    number: int


def made(to: str = "worker1") -> Any:
    return gw.remote(to, torch.add, (ONES, 1))


def plain(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here()


def in_quotes(rref: "RRef[Tensor]") -> Tensor:
    return rref.to_here(timeout=5.0)


def dotted(rref: gw.RRef[torch.Tensor]) -> Tensor:
    return rref.to_here(5.0)


def or_none(rref: RRef[Tensor] | None) -> Tensor:
    return torch.zeros(2) if rref is None else rref.to_here()


def in_variable(rref: RRef[Tensor]) -> Tensor:
    same: RRef[Tensor] = rref
    many: list[RRef[Tensor]] = [same]
    named: dict[str, RRef[Tensor]] = {"a": many[0]}
    return named["a"].to_here()


@pytest.mark.parametrize("function", [plain, in_quotes, dotted, or_none, in_variable])
def test_annotations_of_all_sorts(world: World, function: Any) -> None:
    assert script(function)(made()).tolist() == [2, 2]


def test_none_and_lists_and_tuples(world: World) -> None:
    def call(found: tuple[RRef[Tensor], list[RRef[Tensor]]]) -> Tensor:
        return found[0].to_here() + found[1][0].to_here()

    assert script(call)((made(), [made()])).tolist() == [4, 4]
    assert script(or_none)(None).tolist() == [0, 0]


def test_fields_of_named_tuples_and_classes(world: World) -> None:
    def call(held: Held) -> Tensor:
        return held.rref.to_here() * held.number

    assert script(call)(Held(made(), 2)).tolist() == [4, 4]


def test_a_reference_to_a_reference(world: World) -> None:
    def call(rref: RRef[RRef[Tensor]]) -> Tensor:
        return rref.to_here().to_here()

    assert script(call)(RRef(made())).tolist() == [2, 2]


def test_what_they_tell(world: World) -> None:
    def tell(rref: RRef[Tensor]) -> tuple[str, str, int, bool]:
        owner = rref.owner()
        return rref.owner_name(), owner.name, owner.id, rref.is_owner()

    scripted = script(tell)
    assert scripted(made()) == ("worker1", "worker1", 1, False)
    assert scripted(RRef(ONES)) == ("worker0", "worker0", 0, True)


def test_confirmation_is_told(world: World) -> None:
    def is_confirmed(rref: RRef[Tensor]) -> bool:
        return rref.confirmed_by_owner()

    rref = made()
    rref._get_future().wait()
    assert script(is_confirmed)(rref)


def test_the_value_itself_is_for_its_owner(world: World) -> None:
    scripted = script(local)
    assert scripted(RRef(ONES)) is ONES
    with pytest.raises(RuntimeError, match="local_value\\(\\) on a non-owner RRef"):
        scripted(made())


def test_they_are_passed_on_and_returned(world: World) -> None:
    taker = script(plain)

    def call(rref: RRef[Tensor]) -> tuple[Tensor, RRef[Tensor]]:
        return gw.rpc_sync(rref.owner(), taker, (rref,)), rref

    value, back = script(call)(made())
    assert value.tolist() == back.to_here().tolist() == [2, 2]
    assert type(back) is RRef
    assert back.owner_name() == "worker1"


def sum_of_forks(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(add, x, x))


def local(rref: RRef[Tensor]) -> Tensor:
    return rref.local_value()


def fetched(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here(20.0)


@pytest.mark.parametrize(
    ("get", "to"), [(fetched, "worker1"), (fetched, "worker0"), (local, "worker0")]
)
def test_forks_that_wait_for_values_leave_threads_to_those_that_make_them(
    world: World, get: Any, to: str
) -> None:
    make, fetch = script(sum_of_forks), script(get)

    def call(x: Tensor, count: int, to: str) -> Tensor:
        rrefs = [gw.remote(to, make, (x,)) for _ in range(count)]
        forks = [torch.jit.fork(fetch, rref) for rref in rrefs]
        total = torch.zeros(2)
        for fork in forks:
            total = total + torch.jit.wait(fork)
        return total

    count = torch.get_num_interop_threads() + 2
    scripted = script(call)
    for _ in range(3):
        assert scripted(ONES, count, to).tolist() == [2 * count, 2 * count]


def test_one_made_by_a_script_is_used_in_python(world: World) -> None:
    def call(x: Tensor) -> RRef[Tensor]:
        return gw.remote("worker1", add, (x, x))

    assert script(call)(ONES).rpc_sync().sum().item() == 4


def test_attributes_of_modules_need_no_annotation(world: World) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rrefs = [made(), made("worker0")]
            self.named = {"a": made()}

        def forward(self) -> Tensor:
            total = self.named["a"].to_here()
            for rref in self.rrefs:
                total = total + rref.to_here()
            return total

    assert script(Module())().tolist() == [6, 6]


def test_an_attribute_whose_type_nobody_knows_says_so(world: World) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rref = RRef(object())

        def forward(self) -> bool:
            return self.rref.is_owner()

    with pytest.raises(RuntimeError, match="annotate it"):
        script(Module())


def test_a_module_is_called_where_it_is(world: World) -> None:
    def there(rref: RRef[here.Scales], x: Tensor) -> Tensor:
        return rref.to_here().forward(x, 2)

    def fetched(rref: RRef[here.Scales], x: Tensor) -> Tensor:
        return gw.rpc_sync("worker0", target, (rref, x))

    target = script(there)
    scale = script(here.Scale())
    assert target(RRef(scale, here.Scales), ONES).tolist() == [6, 6]
    elsewhere = gw.rpc_sync("worker1", RRef, (scale,))
    with pytest.raises(RuntimeError, match="RRef to a ScriptModule"):
        script(fetched)(elsewhere, ONES)


def test_a_bare_rref_is_refused(world: World) -> None:
    def bare(rref: RRef) -> Tensor:  # type: ignore[type-arg]
        return rref.to_here()

    with pytest.raises(RuntimeError, match="RRef without a contained type"):
        script(bare)


def test_a_value_of_another_type_is_refused(world: World) -> None:
    with pytest.raises(RuntimeError):
        script(plain)(RRef("a word"))


def test_they_are_not_saved(world: World, tmp_path: Any) -> None:
    def save(rref: RRef[Tensor], path: str) -> None:
        torch.save(rref, path)

    with pytest.raises(RuntimeError, match="only allowed inside RPC calls"):
        script(save)(made(), str(tmp_path / "rref"))


def test_values_go_when_scripts_have_let_go(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        total = torch.zeros(2)
        for _ in range(10):
            rref = gw.remote("worker1", add, (x, x))
            total = total + rref.to_here()
        return total

    assert script(call)(ONES).tolist() == [20, 20]
    gc.collect()
    world[0].references.wait_quiet()
    assert world[0].debug_info()["held"] == []
