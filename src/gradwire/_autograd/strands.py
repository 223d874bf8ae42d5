"""The graph of a context on one worker, where it is simple: what each send reaches by itself.

A *strand* is what one source reaches and no other does, but for leaves. It can be run as soon as
the gradients of its source are there; nothing else has to be known (`tree_pass.py`). Unlike
segments
(`graph.py`), strands are found once for all passes.

Large graphs count as not simple. They take long to run, so gradients should leave while the rest is
still running; and what a pass costs besides does not matter there.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import ddp, hooks
from .contexts import Context
from .gradients import Leaf, are_plain, keep, keep_fresh, look_at
from .graph import SMALL, walk
from .messages import ACCUMULATE, NO_SHORTCUTS, Shortcuts
from .nodes import Crossing, Send


class Ahead(NamedTuple):
    """What can be seen to before gradients come.

    That is the leaves; and their tensors, if these are plain.
    """

    leaves: Sequence[Leaf]
    plain: Sequence[Tensor]


class Reach:
    """What some sources reach: leaves and recvs, given by their nodes."""

    __slots__ = ("inputs", "is_foreign", "leaves", "recvs")

    def __init__(
        self, context: int, leaves: Collection[Any], recvs: Iterable[Any]
    ) -> None:
        self.is_foreign = False
        """Some of it arrived in another context."""
        self.leaves = leaves
        self.recvs: list[Crossing] = []
        inputs = [GradientEdge(node, 0) for node in leaves] if leaves else []
        for node in recvs:
            crossing = node.crossing
            self.recvs.append(crossing)
            for index in range(crossing.count):
                inputs.append(GradientEdge(node, index))
            if crossing.context != context:
                self.is_foreign = True
        self.inputs = tuple(inputs)
        """For the engine: leaves first, then the tensors of each recv."""

    def is_hooked(self) -> bool:
        """Whether users have put hooks on nodes of recvs, which are not run here."""
        return any(recv.is_hooked for recv in self.recvs)


class Strand(Reach):
    """What a send reaches."""

    __slots__ = ("_ends", "_passed_on", "crossing")

    def __init__(
        self, send: Send, leaves: Collection[Any], recvs: Iterable[Any]
    ) -> None:
        super().__init__(send.crossing.context, leaves, recvs)
        self.crossing = send.crossing
        self._ends = tuple([GradientEdge(*edge) for edge in send.edges])
        self._passed_on = send.passed_on if self._ends == self.inputs else ()

    def is_hooked(self) -> bool:
        return self.crossing.is_hooked or super().is_hooked()

    def passes_on(self) -> bool:
        """Whether gradients leave as they came: nothing lies between, not even a hook.

        Hooks outlive the tensors that they were put on: so these are kept, to be asked.
        """
        for tensor, end in zip(self._passed_on, self._ends, strict=False):
            if tensor.grad_fn is not end.node:
                return False  # changed in place since: its hooks are those of what it is now
            if hooks.of_tensor(tensor) or tensor.retains_grad:
                return False
        return bool(self._passed_on)

    def may_return(self) -> bool:
        """Whether it may be one message, passed on to where it came from."""
        if not self._passed_on or len(self.recvs) > 1:
            return False
        return self.recvs[0].worker == self.crossing.worker

    def ends(self, gradients: list[Tensor | None]) -> tuple[GradientEdge, ...]:
        """Where these go in; those that are none are taken out of the list."""
        for gradient in gradients:
            if gradient is None:
                break
        else:
            return self._ends
        ends = zip(self._ends, gradients, strict=True)
        found = tuple([end for end, gradient in ends if gradient is not None])
        gradients[:] = [gradient for gradient in gradients if gradient is not None]
        return found


class BareStrand:
    """Leaves that were sent as they are, each once: that needs no engine."""

    __slots__ = ("_leaves", "_send", "crossing")

    def __init__(self, send: Send) -> None:
        self.crossing = send.crossing
        self._send = send
        self._leaves = send.leaves

    def is_hooked(self) -> bool:
        return self.crossing.is_hooked

    def look_ahead(self) -> Ahead:
        """What can be seen to before the gradients come, for `keep`."""
        if hooks.were_made():
            leaves = look_at([node for node, _ in self._send.edges])
        else:
            leaves = [Leaf(leaf, (), ()) for leaf in self._leaves]
        is_plain = are_plain(leaves)
        return Ahead(leaves, [leaf.tensor for leaf in leaves] if is_plain else ())

    def keep(
        self,
        context: Context,
        gradients: list[Tensor | None],
        flags: int,
        ahead: Mapping[int, Ahead],
    ) -> Strand | None:
        """Keep the gradients of the leaves, whose memory nobody else has.

        Or what to run, if the leaves have hooks.

        Raises:
            Exception: whatever a hook of a node behind a leaf raises.
        """
        leaves, plain = ahead.get(self.crossing.id) or self.look_ahead()
        if plain and not flags & ACCUMULATE:
            keep_fresh(context, plain, gradients)
        elif not [leaf for leaf in leaves if hooks.of_tensor(leaf.tensor)]:
            keep(context, leaves, gradients, flags)
        else:
            return Strand(self._send, [node for node, _ in self._send.edges], ())
        return None


class Strands:
    """Those of one context on one worker."""

    def __init__(self, context: int) -> None:
        self.sends: dict[int, Send] = {}
        """What they were found for."""
        self._context = context
        self._owner: dict[Any, int] = {}
        self._strands: dict[int, Strand | BareStrand] = {}
        # Leaves, each with its node or a send of it; those that several sends reach.
        self._leaves: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}
        self._returns: list[Strand] = []  # those that may be such
        self._is_foreign = False  # something in it arrived in another context
        self._is_odd = False  # so, or it is large, or has replicas in it

    def add(self, send: Send) -> None:
        """Have one more."""
        self.sends[send.crossing.id] = send
        self._look_at(send)
        is_large = len(self._owner) > SMALL
        self._is_odd = is_large or self._is_foreign or bool(ddp.known())

    def _look_at(self, send: Send) -> None:
        number = send.crossing.id
        if send.leaves:
            leaves: dict[int, Any] = {id(leaf): send for leaf in send.leaves}
            if len(leaves) == len(send.leaves):
                self._strands[number] = BareStrand(send)
                self._note(leaves)
                return
        if len(self._owner) > SMALL:
            return
        nodes, recvs, links = walk(send.node, number, self._owner, SMALL)
        self._note(_leaves_of(nodes))
        for other in links:
            self._strands.pop(other, None)
        if not links:
            strand = self._strands[number] = Strand(send, nodes, recvs)
            self._is_foreign |= strand.is_foreign
            if strand.may_return():
                self._returns.append(strand)

    def _note(self, leaves: dict[int, Any]) -> None:
        known = self._leaves
        shared = {n: leaf for n, leaf in leaves.items() if n in known}
        if shared:
            self._shared = {**self._shared, **shared}  # others may look at the old one
        known |= leaves

    def are_simple(self) -> bool:
        """Whether they can be run one by one, as far as size and leaves are concerned."""
        if self._is_odd:
            return False
        return not self._shared or not _is_any_joint(self._shared)

    def get(self, number: int, sender: int, count: int) -> Strand | BareStrand | None:
        """The strand of a send, if so many gradients of this worker can be for it.

        None: they cannot, or it is not that simple.
        """
        strand = self._strands.get(number)
        if strand is None:
            return None
        crossing = strand.crossing
        if crossing.worker != sender or crossing.count != count:
            return None
        return None if hooks.on_crossings and strand.is_hooked() else strand

    def shortcuts(self, to: int, given: Container[int]) -> Shortcuts:
        """Messages of a worker that were passed on to it, and have got no gradients so far."""
        if not self._returns:
            return NO_SHORTCUTS
        found: dict[int, int] = {}
        for strand in self._returns:
            number, count = strand.crossing.id, strand.crossing.count
            if number in given or self.get(number, to, count) is not strand:
                continue
            if strand.passes_on():
                found[number] = strand.recvs[0].id
        return found

    def bare(self) -> Sequence[tuple[int, BareStrand]]:
        """Those that something can be seen to ahead of their gradients, by their sends."""
        known = self._strands
        strands = [(n, known.get(n)) for n in list(known)]  # others may add some
        return [(n, strand) for n, strand in strands if isinstance(strand, BareStrand)]

    def of_roots(self, roots: Sequence[Tensor]) -> Reach | None:
        """What roots reach; None: it is not that simple."""
        owner: dict[Any, int] = {}
        nodes, reached, _ = walk(roots[0].grad_fn, 0, owner, SMALL)
        recvs = dict.fromkeys(reached)
        for root in roots[1:]:
            more, found, _ = walk(root.grad_fn, 0, owner, SMALL)
            nodes |= more
            recvs |= dict.fromkeys(found)
        if len(owner) > SMALL or not owner.keys().isdisjoint(self._owner):
            return None
        if nodes and self._are_joint(nodes):
            return None
        reach = Reach(self._context, nodes, recvs)
        if reach.is_foreign or (hooks.on_crossings and reach.is_hooked()):
            return None
        return reach

    def _are_joint(self, nodes: Iterable[Any]) -> bool:
        """Whether some leaves, given by their nodes, want what is to come for them with it."""
        if ddp.known():
            return True
        leaves = _leaves_of(nodes)
        shared = {n: node for n, node in leaves.items() if n in self._leaves}
        return bool(shared) and _is_any_joint(shared)


def _leaves_of(nodes: Iterable[Any]) -> dict[int, Any]:
    return {id(node.variable): node for node in nodes}


def _is_any_joint(leaves: Mapping[int, Any]) -> bool:
    return any(ddp.is_joint(_node(*leaf)) for leaf in leaves.items())


def _node(leaf: int, known: Any) -> Any:
    """The node of a leaf."""
    if type(known) is not Send:
        return known
    return next(node for node, _ in known.edges if id(node.variable) == leaf)


def strands_of(context: Context) -> Strands:
    """The strands of a context, with its lock held."""
    known: Strands | None = context.strands
    if known is None:
        known = context.strands = Strands(context.id)
    if len(known.sends) < len(context.sends):
        for number, send in context.sends.items():
            if number not in known.sends:
                known.add(send)
    return known
