"""Loss scaling for mixed precision, where the gradients are on several owners.

As `torch.amp.GradScaler`: the loss is multiplied by a scale so that small gradients do not vanish
in half precision, the gradients are divided by it before the step, and a step with gradients that
are not finite is skipped, on all owners or on none. The scale shrinks after such a step, and grows
after many without one.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor

from .optimizer import DistributedOptimizer


class GradScaler:
    """Loss scaling with torch's names; methods that use gradients take a context.

    Unless `enabled`, it does nothing, so that one loop serves both cases.

    >>> scaler = gw.GradScaler(init_scale=8.0)
    >>> scaler.scale(torch.ones(2))
    tensor([8., 8.])
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor={growth_factor} must be greater than 1, and "
                f"backoff_factor={backoff_factor} less than 1"
            )
        self._enabled = enabled
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._finite: dict[tuple[int, int | None], bool] = {}
        """Whether all gradients of an optimizer and context are, since the last update."""

    def __repr__(self) -> str:
        state = f"scale {self._scale:g}" if self._enabled else "not enabled"
        return f"<GradScaler: {state}>"

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        return outputs * self._scale if self._enabled else outputs

    def unscale_(
        self, optimizer: DistributedOptimizer, context_id: int | None = None
    ) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, to inspect or clip them.

        Otherwise `step` does it.

        Raises:
            RuntimeError: they have been unscaled since the last `update`.
        """
        if not self._enabled:
            return
        key = id(optimizer), context_id
        if key in self._finite:
            raise RuntimeError(
                f"the gradients of context {context_id} are unscaled since the last update()"
            )
        largest = optimizer.call_owners("unscale", context_id, 1 / self._scale)
        self._finite[key] = all(map(isfinite, largest.values()))

    def step(
        self, optimizer: DistributedOptimizer, context_id: int | None = None
    ) -> None:
        """Step the optimizer if all gradients on all owners are finite."""
        key = id(optimizer), context_id
        if self._enabled and key not in self._finite:
            self.unscale_(optimizer, context_id)
        if self._finite.get(key, True):
            optimizer.step(context_id)

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale, once per iteration, after its steps.

        Raises:
            RuntimeError: there was no step.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._finite:
            raise RuntimeError("no gradients were unscaled before update(): step first")
        elif not all(self._finite.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._finite.clear()

    def state_dict(self) -> dict[str, Any]:
        """In the format of torch's, which can load it."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict.

        Raises:
            RuntimeError: it is that of a disabled scaler.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state dict is empty: its scaler was not enabled")
        self._scale = state_dict["scale"]
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]
