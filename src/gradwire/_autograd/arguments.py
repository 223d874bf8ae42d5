"""Checks the arguments of a pass where it is called; the messages are PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..errors import GradwireError


def are_usual(context_id: Any, roots: Any) -> bool:
    """Whether a backward pass can start with these; if not, the functions below say why."""
    if type(context_id) is not int or not isinstance(roots, (list, tuple)):
        return False
    for root in roots:
        if not isinstance(root, Tensor) or root.grad_fn is None or root.numel() != 1:
            return False
    return bool(roots)


def check_call(context_id: Any, roots: Any) -> None:
    """Reject arguments with which no backward pass can start.

    Raises:
        TypeError: the id is not a number, or the roots are not tensors.
    """
    is_list = isinstance(roots, (list, tuple))
    if not _is_id(context_id) or not is_list or not _are_tensors(roots):
        raise TypeError(
            "backward(): incompatible function arguments: give the id of a context and a "
            f"list of tensors, not {context_id!r} and {roots!r}"
        )


def check_id(context_id: Any) -> None:
    """Reject what cannot be the id of a context.

    Raises:
        TypeError: it is not a number.
    """
    if not _is_id(context_id):
        raise TypeError(
            f"incompatible function arguments: {context_id!r} is not a context id: "
            "pass what context() returns"
        )


def _is_id(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _are_tensors(given: Iterable[Any]) -> bool:
    return all(isinstance(one, Tensor) for one in given)


def as_flag(name: str, given: Any) -> bool:
    """The value of a boolean option; None means False.

    Raises:
        TypeError: it is not a bool.
    """
    if given is None or isinstance(given, bool):
        return bool(given)
    raise TypeError(f"{name}={given!r}: give True or False")


def as_tensors(name: str, given: Any) -> Sequence[Tensor]:
    """The tensors in an argument of `grad`: one, or a list.

    Raises:
        TypeError: not tensors.
        ValueError: the list is empty.
    """
    tensors = (given,) if isinstance(given, Tensor) else given
    if not isinstance(tensors, (list, tuple)) or not _are_tensors(tensors):
        raise TypeError(
            f"grad(): incompatible function arguments: {name}={given!r}: give a tensor "
            "or a list of tensors"
        )
    if not tensors:
        raise ValueError(f"grad(): {name} is empty: give at least one tensor")
    return tensors


def as_gradients(given: Any, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of each output: as given, or None for ones.

    Raises:
        TypeError, ValueError: the given ones do not match the outputs.
        GradwireError: there is none for an output that is not a scalar.
    """
    gradients = (given,) if isinstance(given, Tensor) else given
    if gradients is None:
        gradients = [None] * len(outputs)
    if not isinstance(gradients, (list, tuple)):
        raise TypeError(f"grad(): grad_outputs={given!r}: give a list of tensors")
    if len(gradients) != len(outputs):
        raise ValueError(
            f"grad(): {len(gradients)} grad_outputs for {len(outputs)} outputs: give one "
            "for each, None for ones"
        )
    for index, (gradient, output) in enumerate(zip(gradients, outputs, strict=True)):
        if gradient is None:
            if output.numel() != 1:
                raise GradwireError(
                    f"outputs[{index}], of shape {tuple(output.shape)}, is not a scalar: "
                    "give grad_outputs"
                )
        elif not isinstance(gradient, Tensor):
            raise TypeError(
                f"grad(): grad_outputs[{index}]={gradient!r}: give a tensor, or None"
            )
        elif gradient.shape != output.shape:
            raise ValueError(
                f"grad(): grad_outputs[{index}] has shape {tuple(gradient.shape)}, "
                f"outputs[{index}] has {tuple(output.shape)}"
            )
    return gradients


def check_inputs(inputs: Sequence[Tensor]) -> None:
    """Reject inputs without gradients.

    Raises:
        GradwireError: one does not require grad.
    """
    for index, tensor in enumerate(inputs):
        if not tensor.requires_grad:
            raise GradwireError(
                f"inputs[{index}], of shape {tuple(tensor.shape)}, does not require grad"
            )


def check_used(found: Sequence[Tensor | None]) -> None:
    """Reject unused inputs.

    Raises:
        GradwireError: an input has no gradient.
    """
    unused = [index for index, gradient in enumerate(found) if gradient is None]
    if unused:
        raise GradwireError(
            f"inputs[{unused[0]}] is not used to compute the outputs; if that is "
            "intended, give allow_unused=True"
        )


def check_roots(roots: Sequence[Tensor]) -> None:
    """Reject roots without gradients.

    Raises:
        GradwireError: there are none, or one is not a scalar with a history.
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
    """Reject tensors whose gradients could not be sent back: they would have other sizes.

    Raises:
        TypeError: one of them is nested.
    """
    for tensor in tensors:
        if tensor.is_nested:
            raise TypeError(
                f"a nested tensor ({tensor.layout}) that requires grad cannot be sent in a "
                "context: send its components and rebuild it there (for jagged ones "
                "values(), offsets() and torch.nested.nested_tensor_from_jagged), or "
                "detach() it"
            )
