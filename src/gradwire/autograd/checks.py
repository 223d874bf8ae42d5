"""The arguments of a pass, checked where it is called; the texts are those of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import GradwireError


def are_usual(context_id: Any, roots: Any) -> bool:
    """Whether a backward pass can be begun with these; if not, those below say why."""
    if type(context_id) is not int or not isinstance(roots, (list, tuple)):
        return False
    for root in roots:
        if not isinstance(root, Tensor) or root.grad_fn is None or root.numel() != 1:
            return False
    return bool(roots)


def check_call(name: str, context_id: Any, tensors: Any) -> None:
    """Refuse what no pass can be begun with.

    Raises:
        TypeError: the id is no number, or these are no tensors.
    """
    is_id = isinstance(context_id, int) and not isinstance(context_id, bool)
    is_list = isinstance(tensors, (list, tuple))
    if not is_id or not is_list or [t for t in tensors if not isinstance(t, Tensor)]:
        raise TypeError(
            f"{name}(): incompatible function arguments: give the id of a context and a "
            f"list of tensors, not {context_id!r} and {tensors!r}"
        )


def check_roots(roots: Sequence[Tensor]) -> None:
    """Refuse roots that nothing can be computed from.

    Raises:
        GradwireError: there are none, or one is no scalar with a history.
    """
    if not roots:
        raise GradwireError("No tensors provided for gradient computation.")
    for index, root in enumerate(roots):
        if not root.requires_grad:
            raise GradwireError(f"requires_grad not set on root {index}")
        if root.numel() != 1:
            raise GradwireError(
                f"root {index}, of shape {tuple(root.shape)}, is not a scalar, all roots "
                "need to be scalar"
            )
        check_history(root)


def check_history(tensor: Tensor) -> None:
    if tensor.grad_fn is None:
        raise GradwireError(
            "a tensor of shape "
            f"{tuple(tensor.shape)} does not have a valid gradient function."
        )


def check_kinds(tensors: Sequence[Tensor]) -> None:
    """Refuse to send what no gradients could come back for: they would have other sizes.

    Raises:
        TypeError: one of them is nested.
    """
    for tensor in tensors:
        if tensor.is_nested:
            raise TypeError(
                f"a nested tensor ({tensor.layout}) that requires grad cannot be sent in a "
                "context: send its parts and put them together there (for jagged ones "
                "values(), offsets() and torch.nested.nested_tensor_from_jagged), or "
                "detach() it"
            )
