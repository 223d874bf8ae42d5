"""Messages as parcels, and frames as messages.

Which encoding is used depends on who is addressed (`Manner`): pickle between workers that trust
each other with it, the safe encoding to and from workers with an allow-list, the user's own
serializer where there is one. A worker with an allow-list decodes the safe encodings only.

    encoding          body
    1  COMPILED       a signature and raw values (`signature_encoder.py`), other data by pickle
    2  PICKLED        a table of tensors (`dense_tensors.py`), then a pickle
    3  SAFE_COMPILED  like 1, other data in the safe encoding
    4  SAFE           like 2, with the safe encoding
    5  CUSTOM         like 2, with the user's serializer
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import NotAllowedError, ProtocolError
from . import dense_tensors, raw_bytes, safe_encoding
from .cargo import Cargo, Carrier, NoRecorder, Recorder, require_grad
from .failures import describe_failure, shorten
from .frames import Frame, Limits, Parcel
from .functions import Names, describe
from .messages import (
    CALL,
    FAILURE,
    FIRST_UPPER,
    RESULT,
    Call,
    Failure,
    GetFields,
    Result,
    TensorMessage,
    fields_of_failure,
    getter,
    has_right_fields,
)
from .pickling import PickleSerializer, Reducer, Serializer
from .signature_decoder import Decoder, load_safely
from .signature_encoder import NO_SUBJECT, Encoder, Subject, dump_pickle, dump_safely

COMPILED, PICKLED, SAFE_COMPILED, SAFE, CUSTOM = 1, 2, 3, 4, 5
_NO_NAMES: tuple[str, ...] = ()
_Upper = tuple[GetFields, bool]  # the flag is that of `Codec.register`
_MOST_TEXT = 10_000  # of a failure that is too large to be sent as it is


class Manner(NamedTuple):
    """How to speak to a worker."""

    plain: bool = False
    """It accepts no pickles."""
    same_main: bool = False
    """It runs the same script, so what that defines can go by name."""
    to: int = -1
    """Who it is."""


class Codec:
    """Encodes and decodes for one worker."""

    def __init__(
        self,
        limits: Limits,
        *,
        plain_only: bool = False,
        custom: Serializer | None = None,
    ) -> None:
        self._limits = limits
        self._plain_only = plain_only
        self._custom = custom
        self._names = Names()
        self._reducers: dict[type, Reducer] = {}
        self._carriers: dict[type, Carrier] = {}
        self._recorder: Any = NoRecorder()
        self._kinds: dict[type, int] = {Call: CALL}
        self._upper: dict[type, _Upper] = {}
        self._types: dict[int, type] = {CALL: Call, RESULT: Result, FAILURE: Failure}
        self._encoders = {
            False: Encoder(COMPILED, dump_pickle, limits),
            True: Encoder(SAFE_COMPILED, dump_safely, limits),
        }
        self._decoders = {SAFE_COMPILED: Decoder(load_safely, self._types, limits)}
        self._loaders: dict[int, Serializer] = {SAFE: safe_encoding}
        if not plain_only:
            self._decoders[COMPILED] = Decoder(pickle.loads, self._types, limits)
            self._loaders[PICKLED] = PickleSerializer(self._reducers, same_main=True)
            if custom is not None:
                self._loaders[CUSTOM] = custom

    def register(self, kind: int, message: type, *, in_context: bool = False) -> None:
        """Teach it a message of an upper layer: a dataclass.

        `in_context`: it belongs to the context in which it is sent, as calls do.
        """
        if kind < FIRST_UPPER or kind > 255 or kind in self._types:
            raise ValueError(f"message code {kind} is taken or not between 16 and 255")
        self._kinds[message] = kind
        self._types[kind] = message
        if not issubclass(message, TensorMessage):
            self._upper[message] = getter(message), in_context

    def register_reducer(self, kind: type, reducer: Reducer) -> None:
        """Pickle objects of exactly this type with `reducer`, as `copyreg` would."""
        self._reducers[kind] = reducer

    def carry(self, kind: type, carrier: Carrier) -> None:
        """Let a carrier keep the books about objects of exactly this type."""
        self._carriers[kind] = carrier

    def record_with(self, recorder: Recorder) -> None:
        """Have the tensors of messages recorded."""
        self._recorder = recorder

    def call(self, call: Call, manner: Manner) -> Parcel:
        """A call as a parcel; also of a message of an upper layer that is one.

        Raises:
            TypeError: an argument cannot be sent.
            ValueError: it is larger than the limits.
        """
        kind = self._kinds[type(call)]
        context = self._recorder.current()
        name = call.function
        if type(name) is not str:
            name = self._names.name_of(name, manner.same_main)
        if name is not None and self._custom is None:
            values, names = call.args, _NO_NAMES
            if call.kwargs:
                values, names = (*values, *call.kwargs.values()), tuple(call.kwargs)
            subject = (name, names, call.modes)
            if kind != CALL:
                values = (call.ids, *values)
            parcel = self._compiled(kind, subject, values, manner, context)
            if parcel is not None:
                return parcel
        if name is None and manner.plain:
            raise NotAllowedError(
                f"{call.function!r} cannot be imported by name, and the worker called "
                "accepts no functions by value (it has an allow-list)"
            )
        target = call.function if name is None else name
        fields = (target, call.args, call.kwargs, call.modes, call.ids)
        try:
            return self._general(kind, fields, manner, context)
        except (RecursionError, pickle.PicklingError) as error:
            if "recursion" not in str(error):
                raise
            what = describe(call.function)
            raise TypeError(f"arguments of {what} nest too deep") from error

    def result(self, value: Any, manner: Manner, context: Any = None) -> Parcel:
        """A result as a parcel, in the context of what it answers."""
        if type(value) is TensorMessage:
            return self._tensor_message(RESULT, value, manner)
        if self._custom is None:
            parcel = self._compiled(RESULT, NO_SUBJECT, (value,), manner, context)
            if parcel is not None:
                return parcel
        return self._general(RESULT, (value,), manner, context)

    def failure(
        self, error: BaseException, manner: Manner, trace: str | None = None
    ) -> Parcel:
        """An exception as a parcel: itself, if it can be sent, and what it says in any case."""
        same = manner.same_main
        pickler = PickleSerializer(self._reducers, same_main=same)
        failure = describe_failure(error, None if manner.plain else pickler, trace)
        try:
            return self._general(FAILURE, fields_of_failure(failure), manner)
        except Exception:  # noqa: BLE001 user code; or it is larger than the limits
            short = shorten(failure, min(_MOST_TEXT, self._limits.body // 16))
            return self._general(FAILURE, fields_of_failure(short), manner)

    def message(self, message: Any, manner: Manner) -> Parcel:
        """A message of an upper layer as a parcel."""
        kind = self._kinds[type(message)]
        upper = self._upper.get(type(message))
        if upper is None:
            return self._tensor_message(kind, message, manner)
        fields_of, in_context = upper
        fields = fields_of(message)
        context = 0
        # Without gradients, what is asked for is sent without them, too.
        if in_context and self._recorder is not None and torch.is_grad_enabled():
            context = self._recorder.current()
        parcel = self._compiled(kind, NO_SUBJECT, fields, manner, context)
        if parcel is None:
            return self._general(kind, fields, manner, context)
        return parcel

    def _tensor_message(
        self, kind: int, message: TensorMessage, manner: Manner
    ) -> Parcel:
        parcel = self._encoders[manner.plain].encode_tensors(kind, message)
        return parcel or self._general(kind, message.unshared(), manner)

    def open(self, frame: Frame, sender: int = -1) -> Any:
        """The message in a frame. It may be used after `frame.waits`.

        Raises:
            ProtocolError: the bytes make no sense.
            NotAllowedError: it holds a pickle, and this worker accepts none.
            Exception: whatever unpickling it raises.
        """
        decoder = self._decoders.get(frame.encoding)
        if decoder is not None:
            message, found = decoder.decode(frame)
            if frame.scope:
                frame.context = self._recorder.arrived(frame, sender, found)
            elif found:
                require_grad(found)
            return message
        loader = self._loaders.get(frame.encoding)
        if loader is None:
            raise self._refusal(frame.encoding)
        cargo = Cargo(self._carriers, sender)
        if frame.encoding == PICKLED:
            loader = PickleSerializer(self._reducers, same_main=True, cargo=cargo)
            frame.waits = cargo.waits
        body = memoryview(frame.body)
        arrived, at = dense_tensors.unpack(body, frame.area)
        fields = loader.loads(body[at:], arrived)
        if frame.scope:
            noted = [tensor for _, tensor in sorted(cargo.tensors.items())]
            traced = (noted or _recorded(arrived)) if frame.mark else []
            if len(arrived) > 1:
                _set_apart(traced, arrived)
            frame.context = self._recorder.arrived(frame, sender, traced)
        return self._from_fields(frame.kind, fields)

    def _refusal(self, encoding: int) -> Exception:
        if encoding in (COMPILED, PICKLED, CUSTOM) and self._plain_only:
            return NotAllowedError(
                "this worker has an allow-list and accepts no pickles"
            )
        if encoding == CUSTOM:
            return ProtocolError("message for a serializer that this worker lacks")
        return ProtocolError(f"unknown encoding {encoding}")

    def _from_fields(self, kind: int, fields: Sequence[Any]) -> Any:
        if not isinstance(fields, (tuple, list)):
            raise ProtocolError(f"message {kind} without fields")
        try:
            if kind == RESULT and len(fields) == 2:
                fields = (TensorMessage(*fields),)
            message = self._types[kind](*fields)
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"message {kind} with wrong fields: {error}") from error
        inner = message.value if kind == RESULT else None
        if not has_right_fields(inner if type(inner) is TensorMessage else message):
            raise ProtocolError(f"message {kind} with fields of wrong types")
        if kind == FAILURE and self._plain_only and message.pickled is not None:
            raise self._refusal(PICKLED)
        return message

    def _compiled(
        self,
        kind: int,
        subject: Subject,
        values: tuple[Any, ...],
        manner: Manner,
        context: Any,
    ) -> Parcel | None:
        encoded = self._encoders[manner.plain].encode(kind, subject, values)
        if encoded is None:
            return None
        parcel, traced = encoded
        if context:
            self._recorder.leaving(context, manner.to, parcel, traced)
        return parcel

    def _general(
        self, kind: int, fields: tuple[Any, ...], manner: Manner, context: Any = None
    ) -> Parcel:
        found: list[torch.Tensor] = []
        cargo = Cargo(self._carriers, manner.to, is_reply=kind == RESULT)
        cargo.is_recorded = bool(context) and torch.is_grad_enabled()
        encoding, serializer = self._serializer(manner, cargo)
        try:
            data = serializer.dumps(fields, found)
            if encoding == CUSTOM and not all(map(dense_tensors.is_plain, found)):
                raise TypeError(
                    "a serializer can put only dense CPU tensors beside its bytes"
                )
            packed = dense_tensors.pack(found)
            body = b"".join((*packed.head, data))
            parcel = Parcel(kind, encoding, body)
            parcel.with_bulk(packed.bulk, packed.bulk_length).check(self._limits)
            if context:
                noted = list(cargo.tensors.values()) or _recorded(found)
                if cargo.is_recorded:
                    self._recorder.check(noted)
                self._recorder.leaving(context, manner.to, parcel, noted)
        except BaseException:
            cargo.take_back()
            raise
        parcel.freight = (*parcel.freight, *cargo.freight)
        return parcel

    def _serializer(self, manner: Manner, cargo: Cargo) -> tuple[int, Serializer]:
        if manner.plain:
            return SAFE, safe_encoding
        if self._custom is not None:
            return CUSTOM, self._custom
        same = manner.same_main
        return PICKLED, PickleSerializer(self._reducers, same_main=same, cargo=cargo)


def _recorded(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that need gradients."""
    return [v for v in values if type(v) is torch.Tensor and v.requires_grad]


def _set_apart(found: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
    """Give each tensor that gets a history memory of its own.

    If they shared some, changing one in place would change others behind autograd's back.
    """
    shares = Counter(map(raw_bytes.place, arrived))
    for tensor in found:
        if shares[raw_bytes.place(tensor)] > 1:
            tensor.data = tensor.data.clone()
