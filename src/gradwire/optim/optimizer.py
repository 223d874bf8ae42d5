"""An optimizer of parameters that live on any workers.

Each owner has an ordinary torch optimizer of its own parameters (`local.py`); a step is one call to
each. This object keeps the groups with references in place of parameters, as a `torch.optim`
optimizer does, so learning rate schedulers work with it. What they change in the groups is sent
with the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .._rref.reference import RRef
from ..api import get_gradients, remote
from ..fanout import call_all
from ..tracebacks import hidden_frames
from .groups import (
    Share,
    changes,
    check_group,
    check_state,
    divide,
    merge_states,
    settings_of,
    split_state,
)
from .local import LocalOptimizer

log = logging.getLogger("gradwire")


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizes parameters on their owners, with any class of `torch.optim`.

    `params_rref` are references to parameters, groups of them (`{"params": [...], "lr": ...}`), or
    pairs of a name and a reference. All other arguments go to the class.

    Raises:
        TypeError, ValueError: not references, or not valid groups.
        Exception: what the class raised on an owner; `OwnersError` if several failed.

    >>> w = gw.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
    >>> optimizer = gw.DistributedOptimizer(torch.optim.SGD, [w], lr=0.5)
    >>> with gw.context() as ctx:
    ...     loss = w.to_here().sum()
    ...     gw.backward(ctx, [loss])
    ...     optimizer.step(ctx)
    >>> w.to_here().detach()
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._make = (optimizer_class, args, kwargs)
        self.owners: dict[str, RRef[LocalOptimizer]] = {}
        self.shares: dict[str, Share] = {}
        with hidden_frames:
            super().__init__(
                params_rref, {}
            )  # torch's own hands us the groups one by one
            self._give_out(0)

    def __repr__(self) -> str:
        counts = {name: len(share.positions) for name, share in self.shares.items()}
        kind = self._make[0].__name__
        return f"{super().__repr__()} of {kind}, parameters by owner: {counts}"

    def step(  # type: ignore[override] # torch's own has this signature
        self, context_id: int | None = None
    ) -> None:
        """Update all parameters that have gradients in the context.

        Without a context: those that have a `.grad`, after `backward(..., accumulate=True)`.
        If some owners fail, the others have completed their step.

        Raises:
            GradwireError: there is no such context.
            Exception: the error on an owner; `OwnersError` if several failed.
        """
        if context_id is not None:
            get_gradients(context_id)  # raises if there is none
        changed = {name: self._changes(share) for name, share in self.shares.items()}
        calls = {
            name: (self.owners[name], "step", (context_id, settings or None))
            for name, settings in changed.items()
        }
        with hidden_frames:
            call_all(calls)
        for name, settings in changed.items():
            for number, values in settings.items():
                self.shares[name].told[number].update(values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` on all owners, where `backward(..., accumulate=True)` fills it."""
        self.call_owners("zero_grad", set_to_none)

    def clip_grad_norm(
        self,
        context_id: int | None,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients in a context so that their total norm is at most `max_norm`.

        Returns:
            The norm before scaling.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        norms = self.call_owners("norm", context_id, float(norm_type))
        parts = torch.tensor(list(norms.values()), dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(parts, norm_type)
        if error_if_nonfinite and not isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: {norms}")
        factor = (max_norm / (norm + 1e-6)).item()
        if not factor >= 1:  # also if it is not a number
            self.call_owners("scale", context_id, factor)
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its settings. If an owner fails, none adds it."""
        self.param_groups.append(check_group(param_group, self.param_groups))
        if not self.owners:
            return  # being made: the owners get all groups in one call
        shares = deepcopy(self.shares)
        try:
            self._give_out(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            self.shares = shares
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a torch optimizer over all these parameters, in the same order."""
        states = self.call_owners("state")
        pairs = ((self.shares[n], self._apart(n, s)) for n, s in states.items())
        groups, position = [], 0
        for group in self.param_groups:
            end = position + len(group["params"])
            groups.append({**group, "params": list(range(position, end))})
            position = end
        return {"state": merge_states(pairs), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of `state_dict`, or of a torch optimizer over the same parameters.

        Raises:
            ValueError: its groups differ.
        """
        check_state(self.param_groups, state_dict)
        saved = [settings_of(group) for group in state_dict["param_groups"]]
        calls = {}
        for name, share in self.shares.items():
            settings = {i: saved[number] for i, number in enumerate(share.groups)}
            state = self._apart(name, split_state(share, state_dict))
            calls[name] = (self.owners[name], "load_state", (state, settings))
        with hidden_frames:
            described = call_all(calls)
        for group, loaded in zip(self.param_groups, saved, strict=True):
            group.update(deepcopy(loaded))
        self._note(described)

    # Talking to owners

    def call_owners(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of every owner's `LocalOptimizer`; what they return, by name."""
        calls = {n: (owner, method, args) for n, owner in self.owners.items()}
        with hidden_frames:
            return call_all(calls)

    def _apart(self, name: str, state: Any) -> Any:
        """State that shares no memory with its owner; remote state is a copy anyway."""
        return deepcopy(state) if self.owners[name].is_owner() else state

    def _changes(self, share: Share) -> dict[int, dict[str, Any]]:
        """The settings that an owner does not have yet."""
        pairs = zip(share.groups, share.told, strict=True)
        found = {
            index: changes(self.param_groups[number], told)
            for index, (number, told) in enumerate(pairs)
        }
        return {index: changed for index, changed in found.items() if changed}

    def _give_out(self, first: int) -> None:
        """Send the groups from this one on to their owners, and read back their settings."""
        parts = divide(self.param_groups, self.shares, first)
        kind, args, kwargs = self._make
        calls: dict[str, tuple[RRef[Any], str, tuple[Any, ...]]] = {}
        for name, groups in parts.items():
            if name in self.owners:
                calls[name] = (self.owners[name], "add_groups", (groups,))
            else:
                made = remote(name, LocalOptimizer, args=(kind, groups, args, kwargs))
                calls[name] = (made, "describe", ())
        try:
            described = call_all(calls)
        except Exception:
            self._take_back(parts.keys() & self.owners.keys())
            raise
        self.owners.update({name: calls[name][0] for name in described})
        self._note(described)

    def _take_back(self, names: Iterable[str]) -> None:
        counts = {name: len(self.shares[name].told) for name in names}
        try:
            call_all(
                {n: (self.owners[n], "keep_groups", (c,)) for n, c in counts.items()}
            )
        except Exception:
            log.debug("taking back a group on %s", list(counts), exc_info=True)

    def _note(self, described: Mapping[str, Any]) -> None:
        """Adopt the owners' settings where there are none here."""
        for name, (defaults, settings) in described.items():
            share = self.shares[name]
            share.told = [changes(values, {}) for values in settings]
            for number, values in zip(share.groups, settings, strict=True):
                for key, value in changes(values, {}).items():
                    self.param_groups[number].setdefault(key, value)
            self.defaults.update(defaults)
