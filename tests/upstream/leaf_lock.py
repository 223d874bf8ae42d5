"""torch 2.13 and 2.15 deadlock if two threads use one leaf, one of them in a Python Function.

    python tests/upstream/leaf_lock.py        freezes, mostly within a second
    python tests/upstream/leaf_lock.py held   does not: see below

`p.sin()` asks for the AccumulateGrad node of `p` (`torch::autograd::impl::grad_accumulator`). That
function locks a mutex of the tensor. With it locked, it takes the GIL: to make the node, which
holds on to `p` (`TensorImpl::incref_pyobject`); or to lock the weak pointer to a node that only its
Python object keeps alive (`weak_intrusive_ptr<Node>::lock`, `PyInterpreter::try_incref`).
`Function.apply(p)` (`THPFunction_apply`, `unpack_input`, `gradient_edge`) asks for the same node
with the GIL held. So each thread has what the other one waits for:

    thread 1: sin      -> grad_accumulator: has the mutex -> incref_pyobject: wants the GIL
    thread 2: apply    -> has the GIL -> grad_accumulator: wants the mutex

As long as some graph holds the node, neither happens: `held` keeps one alive around the `apply`.
`Function.apply` could let go of the GIL there, or `grad_accumulator` take what it needs before it
locks.
"""

import faulthandler
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

ROUNDS = 200_000
SECONDS = (
    20.0  # that it runs; it is frozen if 1,000 rounds take as long: shows all stacks
)


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def compute(p: Tensor, is_over: threading.Event) -> None:
    while not is_over.is_set():
        p.sin()


def main() -> None:
    is_held = sys.argv[1:] == ["held"]
    torch.set_num_threads(1)
    p, is_over = torch.ones(3, requires_grad=True), threading.Event()
    thread = threading.Thread(target=compute, args=(p, is_over))
    thread.start()
    deadline = time.monotonic() + SECONDS
    for number in range(ROUNDS):
        if number % 1000 == 0:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
        graph = p.view_as(p) if is_held else None
        Same.apply(p)
        del graph
        if time.monotonic() > deadline:
            break
    faulthandler.cancel_dump_traceback_later()
    is_over.set()
    thread.join()
    sys.stdout.write(f"torch {torch.__version__} did not freeze\n")


if __name__ == "__main__":
    main()
