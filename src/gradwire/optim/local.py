"""The part of a distributed optimizer on one owner: an ordinary torch optimizer, and its gradients.

Gradients come from a context, or from `.grad` without one. An ordinary optimizer reads `.grad`, so
during a step the gradients of the context are placed there, and the previous values are restored
afterwards. Several optimizers may share parameters: a step holds the lock of each of its
parameters, acquired in one global order, while steps on other parameters proceed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, optim
from torch.nn.utils import get_total_norm

from ..api import get_gradients
from ..errors import GradwireError
from .groups import Group, settings_of
from .implementations import is_free, quickest_way

Changes = Mapping[int, Mapping[str, Any]]
"""New settings, by number of the group on this owner."""


class LocalOptimizer:
    """A torch optimizer over parameters of this worker."""

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        groups: Sequence[Group],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        params: list[Any] = [_with_values(group) for group in groups]
        if len(params) == 1 and params[0].keys() == {"params"}:
            params = params[0]["params"]  # as it was given: not every class has groups
        self.optimizer = optimizer_class(params, *args, **kwargs)
        self._note_params()

    def __repr__(self) -> str:
        kind = type(self.optimizer).__name__
        return f"<LocalOptimizer: {kind} of {len(self.params)} parameters>"

    def _note_params(self) -> None:
        groups = self.optimizer.param_groups
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self._locks = _locks_of(self.params)

    def describe(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The defaults, and the settings of each group."""
        groups = self.optimizer.param_groups
        return self.optimizer.defaults, [settings_of(group) for group in groups]

    def add_groups(
        self, groups: Sequence[Group]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Take more parameters. Returns what `describe` does."""
        before = len(self.optimizer.param_groups)
        with self._locked():
            try:
                for group in groups:
                    self.optimizer.add_param_group(_with_values(group))
            except Exception:
                del self.optimizer.param_groups[before:]
                raise
            self._note_params()
        return self.describe()

    def keep_groups(self, count: int) -> None:
        """Drop all but the first groups, because another owner failed to add the rest."""
        with self._locked():
            del self.optimizer.param_groups[count:]
            self._note_params()

    def step(self, context_id: int | None, changed: Changes | None = None) -> None:
        """Update the parameters that have gradients."""
        gradients = None if context_id is None else gradients_in(context_id)
        with self._locked():
            for number, settings in (changed or {}).items():
                self.optimizer.param_groups[number].update(settings)
            if gradients is None:
                self._step([param.grad for param in self.params])
                return
            before = [param.grad for param in self.params]
            grads = [gradients.get(param) for param in self.params]
            try:
                for param, grad in zip(self.params, grads, strict=True):
                    param.grad = grad
                self._step(grads)
            finally:
                for param, grad in zip(self.params, before, strict=True):
                    param.grad = grad

    def _step(self, grads: Sequence[Tensor | None]) -> None:
        """Step the optimizer with what is in `.grad`."""
        way = quickest_way(type(self.optimizer), grads)
        if way is None:
            self.optimizer.step()
            return
        groups = [group for group in self.optimizer.param_groups if is_free(group)]
        try:
            for group in groups:
                group[way] = True
            self.optimizer.step()
        finally:
            for group in groups:
                group[way] = None

    def zero_grad(self, set_to_none: bool) -> None:
        with self._locked():
            self.optimizer.zero_grad(set_to_none)

    def norm(self, context_id: int | None, norm_type: float) -> float:
        """The norm of all gradients here."""
        values = [_values(g) for g in self._gradients(context_id)]
        return get_total_norm(values, norm_type).item() if values else 0.0

    @torch.no_grad()
    def scale(self, context_id: int | None, factor: float) -> None:
        """Multiply all gradients here."""
        for gradient in self._gradients(context_id):
            gradient.mul_(factor)

    def unscale(self, context_id: int | None, factor: float) -> float:
        """Multiply all gradients here; the largest, which tells whether all are finite.

        Raises:
            ValueError: they have half precision, and small ones would be lost.
        """
        if any(g.dtype is torch.float16 for g in self._gradients(context_id)):
            raise ValueError(
                "Attempting to unscale FP16 gradients: keep parameters in float32 and "
                "run the forward pass under autocast"
            )
        self.scale(context_id, factor)
        return self.norm(context_id, inf)

    def state(self) -> dict[int, Any]:
        """The state of each parameter, by its number here."""
        with self._locked():
            state: dict[int, Any] = self.optimizer.state_dict()["state"]
        return state

    def load_state(
        self, state: dict[int, Any], changed: Changes
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Load the state of each parameter, and settings. Returns what `describe` does."""
        with self._locked():
            whole = self.optimizer.state_dict()
            for number, settings in changed.items():
                whole["param_groups"][number].update(settings)
            self.optimizer.load_state_dict({**whole, "state": state})
        return self.describe()

    def _gradients(self, context_id: int | None) -> list[Tensor]:
        if context_id is None:
            return [p.grad for p in self.params if p.grad is not None]
        gradients = gradients_in(context_id)
        return [gradients[p] for p in self.params if p in gradients]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        taken = []
        try:
            for lock in self._locks:
                lock.acquire()
                taken.append(lock)
            yield
        finally:
            for lock in taken:
                lock.release()


def gradients_in(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients of a context; none where it has never been."""
    try:
        return get_gradients(context_id)
    except GradwireError:
        return {}  # the caller has checked that the context exists


def _values(gradient: Tensor) -> Tensor:
    """The numbers in a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _with_values(group: Group) -> Group:
    return {**group, "params": [rref.local_value() for rref in group["params"]]}


_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
"""By id of the parameter. Whoever has a lock has its parameter, so no id is used again."""
_making = threading.Lock()


def _locks_of(params: Sequence[Tensor]) -> list[threading.Lock]:
    """The locks of parameters, in the order to take them."""
    with _making:
        return [
            _locks.setdefault(key, threading.Lock()) for key in sorted(map(id, params))
        ]
