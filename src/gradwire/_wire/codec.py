"""Messages as parcels, and frames as messages.

Which encoding is used depends on who is addressed (`Manner`): pickle between workers that trust
each other with it, the plain encoding to and from workers with an allow-list, the user's own
serializer where there is one. A worker with an allow-list decodes the plain encodings only.

    encoding          body
    1  SHORT          a signature and raw values (`signature_encoder.py`), data by pickle
    2  GENERAL        a table of tensors (`dense_tensors.py`), then a pickle
    3  PLAIN_SHORT    like 1, data in the plain encoding
    4  PLAIN_GENERAL  like 2, with the plain encoding
    5  CUSTOM         like 2, with the user's serializer
    6  PACKET         numbers and tensors (`packets.py`), to and from everyone
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import NotAllowedError, ProtocolError
from . import dense_tensors, packets, raw_bytes, safe_encoding
from .cargo import Cargo, Carrier, NoRecorder, Recorder, require_grad
from .failures import describe_failure, shorten
from .fields import Fields, are_ids, fields_are_right, fields_of_failure, getter
from .frames import Frame, Limits, Parcel
from .functions import Names, describe
from .messages import CALL, FAILURE, FIRST_UPPER, RESULT, Call, Failure, Result
from .packets import Packet, PacketDecoder, PacketEncoder
from .pickling import PickleSerializer, Reducer, Serializer
from .signature_decoder import Decoder, load_plain
from .signature_encoder import Encoder, Subject, dump_pickle, dump_plain
from .tensor_prealloc import Stock

SHORT, GENERAL, PLAIN_SHORT, PLAIN_GENERAL, CUSTOM, PACKET = 1, 2, 3, 4, 5, 6
_NO_NAMES: tuple[str, ...] = ()
_RESULT: Subject = (RESULT, None, (), None, False)
_SPREAD_RESULT: Subject = (RESULT, None, (), None, True)
_Upper = tuple[Subject, Fields, bool]  # the flag is that of `Codec.register`
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
            False: Encoder(SHORT, dump_pickle, limits),
            True: Encoder(PLAIN_SHORT, dump_plain, limits),
        }
        self._stock = Stock()
        self._decoders = {PLAIN_SHORT: Decoder(load_plain, self._stock)}
        self._packets = PacketEncoder(PACKET)
        self._packet_decoder = PacketDecoder(self._stock)
        self._loaders: dict[int, Serializer] = {PLAIN_GENERAL: safe_encoding}
        if not plain_only:
            self._decoders[SHORT] = Decoder(pickle.loads, self._stock)
            self._loaders[GENERAL] = PickleSerializer(self._reducers, same_main=True)
            if custom is not None:
                self._loaders[CUSTOM] = custom

    def register(self, kind: int, message: type, *, in_context: bool = False) -> None:
        """Teach it a message of an upper layer: a dataclass, or a `Packet`.

        `in_context`: it belongs to the context in which it is sent, as calls do.
        """
        if kind < FIRST_UPPER or kind > 255 or kind in self._types:
            raise ValueError(f"message code {kind} is taken or not between 16 and 255")
        self._kinds[message] = kind
        self._types[kind] = message
        if not issubclass(message, Packet):
            subject = (kind, None, (), None, False)
            self._upper[message] = subject, getter(message), in_context

    def register_reducer(self, kind: type, reducer: Reducer) -> None:
        """Pickle objects of exactly this type with `reducer`, as `copyreg` would."""
        self._reducers[kind] = reducer

    def carry(self, kind: type, carrier: Carrier) -> None:
        """Let a carrier keep the books about objects of exactly this type."""
        self._carriers[kind] = carrier

    def record_with(self, recorder: Recorder) -> None:
        """Have the tensors of messages recorded."""
        self._recorder = self._stock.recorder = recorder

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
            subject = (kind, name, names, call.modes, False)
            if kind != CALL:
                values = (call.ids, *values)
            parcel = self._short(subject, values, manner, context)
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
        if type(value) is Packet:
            return self._packet(RESULT, value, manner)
        if self._custom is None:
            if type(value) is tuple:
                parcel = self._short(_SPREAD_RESULT, value, manner, context)
            else:
                parcel = self._short(_RESULT, (value,), manner, context)
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
        upper = self._upper.get(type(message))
        if upper is None:
            return self._packet(self._kinds[type(message)], message, manner)
        subject, fields_of, in_context = upper
        fields = fields_of(message)
        context = 0
        # Without gradients, what is asked for is sent without them, too.
        if in_context and self._recorder is not None and torch.is_grad_enabled():
            context = self._recorder.current()
        parcel = self._short(subject, fields, manner, context)
        if parcel is None:
            return self._general(subject[0], fields, manner, context)
        return parcel

    def _packet(self, kind: int, packet: Packet, manner: Manner) -> Parcel:
        parcel = self._packets.encode(kind, packet)
        if parcel is None:
            fields = packets.apart(packet)
            return self._general(kind, (fields,) if kind == RESULT else fields, manner)
        if len(parcel.body) > self._limits.body or parcel.bulk_length:
            parcel.check(self._limits)
        if self._stock.wanted:
            parcel.afterwards += (self._stock.refill,)
        return parcel

    def open(self, frame: Frame, sender: int = -1) -> Any:
        """The message in a frame. It may be used after `frame.waits`.

        Raises:
            ProtocolError: the bytes make no sense.
            NotAllowedError: it holds a pickle, and this worker accepts none.
            Exception: whatever unpickling it raises.
        """
        if frame.encoding == PACKET:
            return self._open_packet(frame)
        decoder = self._decoders.get(frame.encoding)
        if decoder is not None:
            plan, values = decoder.decode(frame)
            found = plan.pick(values)
            if frame.scope:
                frame.context = self._recorder.arrived(frame, sender, found)
            elif found:
                require_grad(found)
            if plan.make is not None and plan.kind == frame.kind:
                return plan.make(values)
            return self._from_values(frame.kind, plan.subject, values)
        loader = self._loaders.get(frame.encoding)
        if loader is None:
            raise self._refusal(frame.encoding)
        cargo = Cargo(self._carriers, sender)
        if frame.encoding == GENERAL:
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

    def _open_packet(self, frame: Frame) -> Any:
        numbers, arrived = self._packet_decoder.decode(frame)
        if frame.kind == RESULT:
            return Result(Packet(numbers, arrived))
        message = self._types.get(frame.kind)
        if message is None or not issubclass(message, Packet):
            raise ProtocolError(f"message {frame.kind} as a packet")
        return message(numbers, arrived)

    def _refusal(self, encoding: int) -> Exception:
        if encoding in (SHORT, GENERAL, CUSTOM) and self._plain_only:
            return NotAllowedError(
                "this worker has an allow-list and accepts no pickles"
            )
        if encoding == CUSTOM:
            return ProtocolError("message for a serializer that this worker lacks")
        return ProtocolError(f"unknown encoding {encoding}")

    def _from_values(self, kind: int, subject: Subject, values: tuple[Any, ...]) -> Any:
        of, name, keywords, modes, _ = subject
        if of != kind and not self._extends(kind, of):
            raise ProtocolError(f"message {kind} with a signature of {of}")
        if name is None:
            return self._from_fields(kind, values)
        ids: Any = ()
        if kind != CALL and values:
            ids, values = values[0], values[1:]
        count = len(values) - len(keywords)
        if count < 0:
            raise ProtocolError(f"message {kind} with more names than values")
        kwargs = dict(zip(keywords, values[count:], strict=True))
        args = tuple(values[:count])
        if kind == CALL:
            return Call(name, args, kwargs, modes)
        message = self._types.get(kind)
        if message is None or not issubclass(message, Call) or not are_ids(ids):
            raise ProtocolError(f"message {kind} is no call, or its numbers are none")
        return message(name, args, kwargs, modes, ids)

    def _extends(self, kind: int, other: int) -> bool:
        """Whether one kind of message is another, and more."""
        return issubclass(self._types.get(kind, int), self._types.get(other, str))

    def _from_fields(self, kind: int, fields: Sequence[Any]) -> Any:
        if not isinstance(fields, (tuple, list)):
            raise ProtocolError(f"message {kind} without fields")
        try:
            message = self._types[kind](*fields)
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"message {kind} with wrong fields: {error}") from error
        if not fields_are_right(message):
            raise ProtocolError(f"message {kind} with fields of wrong types")
        if kind == FAILURE and self._plain_only and message.pickled is not None:
            raise self._refusal(GENERAL)
        return message

    def _short(
        self, subject: Subject, values: tuple[Any, ...], manner: Manner, context: Any
    ) -> Parcel | None:
        encoded = self._encoders[manner.plain].encode(subject, values)
        if encoded is None:
            return None
        parcel, known = encoded
        parcel.habit = known.habit
        if context:
            self._recorder.leaving(context, manner.to, parcel, known.pick(values))
        if self._stock.wanted:
            parcel.afterwards += (self._stock.refill,)
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
            return PLAIN_GENERAL, safe_encoding
        if self._custom is not None:
            return CUSTOM, self._custom
        same = manner.same_main
        return GENERAL, PickleSerializer(self._reducers, same_main=same, cargo=cargo)


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
