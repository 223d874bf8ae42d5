"""A model spread over workers: a tree of modules, some leaves of which are proxies.

One worker's part of it is a module with all its children, except what is behind the proxies of
modules on other workers. Those may have proxies in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from torch import nn

from .._rref.reference import RRef
from ..api import rpc_async

Named = list[tuple[str, RRef[nn.Parameter]]]


class Standin(nn.Module):
    """A leaf that is the proxy of a module on another worker."""

    module_rref: RRef[nn.Module]


class Part(NamedTuple):
    """One worker's part of a model, and the prefix of its names."""

    prefix: str
    module: RRef[nn.Module]


def remote_parameters(module: nn.Module) -> list[RRef[nn.Parameter]]:
    """References to all parameters of a model, including those of its remote modules.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 3), gw.RemoteModule("worker1", torch.nn.Linear, (3, 1))
    ... )
    >>> [rref.owner_name() for rref in gw.nn.remote_parameters(model)]
    ['worker0', 'worker0', 'worker1', 'worker1']
    """
    return [rref for _, rref in named_remote_parameters(module)]


def named_remote_parameters(module: nn.Module) -> Named:
    """As `remote_parameters`, with the names in the state dict: `[("0.weight", rref), ...]`.

    >>> model = torch.nn.Sequential(gw.RemoteModule("worker1", torch.nn.Linear, (3, 1)))
    >>> [name for name, rref in gw.nn.named_remote_parameters(model)]
    ['0.weight', '0.bias']
    """
    return _named_parameters(module, "")


def parameters_behind(module: RRef[nn.Module], prefix: str, recurse: bool) -> Named:
    """Runs on the owner of a module: references to its parameters."""
    if recurse:
        return _named_parameters(module.local_value(), prefix)
    own = module.local_value().named_parameters(prefix, recurse=False)
    return [(name, RRef(parameter)) for name, parameter in own]


def find_parts(module: nn.Module, prefix: str = "") -> list[Part]:
    """All parts of a model, the one of this worker first."""
    parts = [] if isinstance(module, Standin) else [Part(prefix, RRef(module))]
    asked = [
        rpc_async(leaf.module_rref.owner(), parts_behind, args=(leaf.module_rref, name))
        for name, leaf in module.named_modules(prefix=prefix)
        if isinstance(leaf, Standin)
    ]
    return parts + [part for answer in asked for part in answer.wait()]


def parts_behind(module: RRef[nn.Module], prefix: str) -> list[Part]:
    """Runs on the owner of a module: the parts it is made of."""
    return find_parts(module.local_value(), prefix)


def state_of_part(module: nn.Module) -> dict[str, Any]:
    """The state dict of a module, without what is behind its leaves. It shares their memory."""
    return module.state_dict(destination=PartState())


class PartState(OrderedDict[str, Any]):
    """A state dict in which stand-ins put nothing."""


def _named_parameters(module: nn.Module, prefix: str) -> Named:
    """In the order in which one process would have them."""
    found: list[Any] = []
    seen = set()
    for name, member in module.named_modules(prefix=prefix):
        if isinstance(member, Standin):
            rref = member.module_rref
            there = rpc_async(rref.owner(), parameters_behind, args=(rref, name, True))
            found.append(there)
            continue
        for path, parameter in member.named_parameters(name, recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append([(path, RRef(parameter))])
    return [
        pair
        for entry in found
        for pair in (entry if isinstance(entry, list) else entry.wait())
    ]
