"""A network of four parts, each made where it is wanted.

    stem ──┬── fine ────┬── head
           └── coarse ──┘

The same class serves both runs: a part is an ordinary module, or a `RemoteModule` that stands for
one on another worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import RemoteModule

PLACES = {
    "stem": "worker0",
    "fine": "worker1",
    "coarse": "worker2",
    "head": "worker3",
}


class Stem(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())


class Branch(nn.Sequential):
    """Looks for strokes; the wider its window, the longer the strokes."""

    def __init__(self, window: int) -> None:
        torch.manual_seed(window)
        super().__init__(
            nn.Conv2d(8, 16, window, padding=window // 2), nn.ReLU(), nn.MaxPool2d(2)
        )


class Head(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__()
        self.hidden = nn.Linear(2 * 16 * 4 * 4, 64)
        self.digits = nn.Linear(64, 10)

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        both = torch.cat([fine, coarse], 1).flatten(1)
        result: Tensor = self.digits(torch.relu(self.hidden(both)))
        return result


Make = Callable[..., nn.Module]
"""Makes a part: its name, its class and what that is given."""


def here(name: str, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A part in this process."""
    return kind(*args).double()


def spread(name: str, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A part on its worker; that of worker0 is here."""
    if PLACES[name] == "worker0":
        return here(name, kind, *args)
    return RemoteModule(PLACES[name], here, (name, kind, *args))


class Network(nn.Module):
    """Says which digit is on a picture."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.stem = make("stem", Stem)
        self.fine = make("fine", Branch, 3)
        self.coarse = make("coarse", Branch, 5)
        self.head = make("head", Head)

    def forward(self, pictures: Tensor) -> Tensor:
        strokes = self.stem(pictures)
        if isinstance(self.fine, RemoteModule):
            fine = self.fine.forward_async(strokes)  # both branches at the same time
            coarse = self.coarse(strokes)
            result: Tensor = self.head(fine.wait(), coarse)
        else:
            result = self.head(self.fine(strokes), self.coarse(strokes))
        return result
