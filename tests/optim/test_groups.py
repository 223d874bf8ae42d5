"""Groups, and the choice of an implementation: what needs no world."""

import pytest
import torch
from torch import optim

from gradwire.optim.groups import Share, changes, merge_states, split_state
from gradwire.optim.implementations import is_free, quickest_way

DENSE = [torch.ones(3), None, torch.ones(2)]


@pytest.mark.parametrize(
    ("kind", "grads", "way"),
    [
        (optim.Adam, DENSE, "fused"),
        (optim.Adam, [], "fused"),
        (optim.RMSprop, DENSE, "foreach"),
        (optim.RMSprop, [torch.empty(2 << 20, device="meta")], None),
        (optim.SGD, [torch.ones(2, 2).to_sparse()], None),
        (optim.SGD, [torch.ones(2, device="meta")], None),
        (optim.SGD, [torch.ones(2, dtype=torch.complex64)], None),
        (optim.ASGD, DENSE, None),
        (type("Own", (optim.SGD,), {}), DENSE, None),
    ],
)
def test_the_way_is_one_that_can_be_gone(
    kind: type, grads: list[torch.Tensor | None], way: str | None
) -> None:
    assert quickest_way(kind, grads) == way


@pytest.mark.parametrize(
    ("settings", "free"),
    [
        ({}, True),
        ({"foreach": None, "fused": None}, True),
        ({"foreach": False}, False),
        ({"fused": False}, False),
        ({"differentiable": True}, False),
        ({"lr": torch.tensor(0.1)}, False),
    ],
)
def test_what_the_user_has_said_counts(settings: dict[str, object], free: bool) -> None:
    assert is_free({"lr": 0.1, **settings}) is free


def test_only_what_changed_is_told() -> None:
    rate = torch.tensor(0.1)
    group = {"params": [1], "param_names": ["a"], "lr": rate, "betas": (0.9, 0.99)}
    told = changes(group, {})
    assert told.keys() == {"lr", "betas"}
    assert changes(group, told) == {}
    rate.mul_(2)  # in place, and what was told is not touched by it
    assert list(changes(group, told)) == ["lr"]
    group["betas"] = (0.8, 0.99)
    assert changes(group, {**told, "lr": 0.2}).keys() == {"lr", "betas"}


def test_states_are_split_and_merged_by_position() -> None:
    one, other = Share(positions=[0, 3]), Share(positions=[1, 2])
    whole = {"state": {7: "a", 5: "c", 4: "d"}, "param_groups": [{"params": [7, 6]}]}
    whole["param_groups"] += [{"params": [5, 4]}]  # type: ignore[operator]
    parts = [(share, split_state(share, whole)) for share in (one, other)]
    assert parts[0][1] == {0: "a", 1: "d"}
    assert parts[1][1] == {1: "c"}
    assert merge_states(parts) == {0: "a", 2: "c", 3: "d"}
