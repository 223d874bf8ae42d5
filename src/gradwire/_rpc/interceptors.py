"""Hooks of the upper layers into messages that leave and arrive.

The codec reports what it found in a message: the tensors that require grad, and objects of some
types that are sent as a few numbers. Upper layers register an interceptor for each: a `Recorder`
for the tensors, a `Carrier` for the objects. What they track about a message travels with it here:
a parcel's `freight` is told the outcome; a frame's `waits` complete before it is answered, if it is
a request, or used, if it is a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, is_grad_enabled

from .._wire.codec import Codec, Manner
from .._wire.frames import Frame, Freight, Parcel, Wait
from .._wire.messages import Call, TensorMessage
from .._wire.signature_encoder import Encoded


class Carrier(Protocol):
    """Replaces objects of some types by numbers in a message, and restores them."""

    width: int
    """How many numbers replace one."""

    def load(
        self, thing: Any, to: int, is_reply: bool
    ) -> tuple[tuple[int, ...], Freight]:
        """The numbers that replace an object in a message to a worker.

        The freight of a response is told only if it was not sent: a response has no response.
        """

    def unload(self, fields: tuple[int, ...], sender: int) -> tuple[Any, Wait | None]:
        """The restored object, and what must complete before its message is answered or used."""


class Recorder(Protocol):
    """Records tensors that require grad, when they leave and when they arrive.

    A context is an opaque object: it is looked up once for a message, and passed on.
    """

    def current(self) -> Any:
        """The context of this thread; None if there is none."""

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Reject tensors that cannot be recorded; those of compiled signatures can be.

        Raises:
            TypeError: there is one.
        """

    def leaving(
        self, context: Any, to: int, parcel: Parcel, tensors: Sequence[Tensor]
    ) -> None:
        """Record the tensors of an outgoing message; metadata goes onto the parcel."""

    def lost_arguments(self) -> None:
        """The arguments of a call require grad, but there is no context to record them in."""

    def lost_result(self, request: Any) -> None:
        """The same for the result of this request."""

    def arrived(self, frame: Frame, sender: int, tensors: Sequence[Tensor]) -> Any:
        """Record the tensors of an incoming message; returns its context.

        With a mark they get their history, in place; without one, they are leaves.
        """


class Replaced:
    """The objects in an outgoing message that are replaced by numbers."""

    __slots__ = ("_carrier", "_is_reply", "_to", "freight")

    def __init__(self, carrier: Carrier, to: int, is_reply: bool) -> None:
        self._carrier = carrier
        self._to = to
        self._is_reply = is_reply
        self.freight: list[Freight] = []

    def __call__(self, thing: Any) -> tuple[int, ...]:
        fields, freight = self._carrier.load(thing, self._to, self._is_reply)
        self.freight.append(freight)
        return fields

    def take_back(self) -> None:
        """Undo: the message was not sent."""
        for freight in self.freight:
            freight.in_doubt()


class Restored:
    """The objects in an incoming message that are restored from numbers."""

    __slots__ = ("_carrier", "_sender", "waits")

    def __init__(self, carrier: Carrier, sender: int) -> None:
        self._carrier = carrier
        self._sender = sender
        self.waits: list[Wait] = []

    def __call__(self, *fields: int) -> Any:
        thing, wait = self._carrier.unload(fields, self._sender)
        if wait is not None:
            self.waits.append(wait)
        return thing


class InterceptedCodec:
    """The codec of an agent, with the interceptors of upper layers."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._recorder: Recorder | None = None
        self._in_context: set[type] = set()
        self.failure = codec.failure
        self.register_reducer = codec.register_reducer

    def register(self, kind: int, message: type, *, in_context: bool = False) -> None:
        """Register a message type of an upper layer.

        `in_context`: it belongs to the context in which it is sent, as calls do.
        """
        self._codec.register(kind, message)
        if in_context:
            self._in_context.add(message)

    def record_with(self, recorder: Recorder) -> None:
        """Set the recorder of tensors."""
        self._recorder = recorder

    def carry(self, kinds: Sequence[type], carrier: Carrier) -> None:
        """Register the carrier of objects of exactly these types."""
        self._codec.replace(
            kinds,
            carrier.width,
            lambda to, is_reply: Replaced(carrier, to, is_reply),
            lambda sender: Restored(carrier, sender),
        )

    def call(self, call: Call, manner: Manner) -> Parcel:
        """Encode a call, in this thread's context.

        Raises:
            TypeError: an argument cannot be sent.
            ValueError: it is larger than the limits.
        """
        recorder = self._recorder
        context = None if recorder is None else recorder.current()
        is_traced = context is not None and is_grad_enabled()
        encoded = self._codec.call(call, manner, is_traced=is_traced)
        if encoded[1] and context is None and recorder is not None:
            recorder.lost_arguments()
        if context is None and encoded[2] is None:
            return encoded[0]
        return self._intercepted(encoded, context, manner)

    def result(
        self, value: Any, manner: Manner, context: Any = None, request: Any = None
    ) -> Parcel:
        """Encode a result, in the context of the request it responds to."""
        if type(value) is TensorMessage:
            context = None
        is_traced = context is not None and is_grad_enabled()
        encoded = self._codec.result(value, manner, is_traced=is_traced)
        if encoded[1] and context is None and self._recorder is not None:
            self._recorder.lost_result(request)
        if context is None and encoded[2] is None:
            return encoded[0]
        return self._intercepted(encoded, context, manner)

    def message(self, message: Any, manner: Manner) -> Parcel:
        """Encode a message of an upper layer."""
        context = None
        # In no-grad mode, the response is sent without gradients as well.
        if type(message) in self._in_context and is_grad_enabled():
            context = None if self._recorder is None else self._recorder.current()
        encoded = self._codec.message(message, manner, is_traced=context is not None)
        if context is None and encoded[2] is None:
            return encoded[0]
        return self._intercepted(encoded, context, manner)

    def _intercepted(self, encoded: Encoded, context: Any, manner: Manner) -> Parcel:
        parcel, traced, replaced = encoded
        if context is not None and self._recorder is not None:
            try:
                if replaced is not None and traced:
                    self._recorder.check(traced)
                self._recorder.leaving(context, manner.to, parcel, traced)
            except BaseException:
                if replaced is not None:
                    replaced.take_back()
                raise
        if replaced is not None and replaced.freight:
            parcel.freight = (*parcel.freight, *replaced.freight)
        return parcel

    def open(self, frame: Frame, sender: int) -> Any:
        """Decode the message in a frame. For `frame.waits`, see there.

        Raises:
            ProtocolError: the bytes are malformed.
            NotAllowedError: it holds a pickle, and this worker accepts none.
            Exception: whatever unpickling it raises.
        """
        message, traced, restored = self._codec.open(frame, sender)
        if restored is not None:
            frame.waits = restored.waits
        if frame.scope and self._recorder is not None:
            frame.context = self._recorder.arrived(frame, sender, traced)
        elif traced:
            for tensor in traced:
                tensor.requires_grad_()
        return message
