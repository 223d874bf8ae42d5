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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import streams
from ..errors import NotAllowedError, ProtocolError
from . import dense_tensors, raw_bytes, safe_encoding
from .device_maps import DeviceMap, DeviceMaps, UnlistedError, for_call, for_result
from .failures import describe_failure, shorten
from .frames import Frame, Limits, Parcel, Replacing, Restoring
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
from .pickling import Beside, PickleSerializer, Reducer, Serializer
from .signature_decoder import Decoder, Opened, load_safely
from .signature_encoder import (
    NO_SUBJECT,
    Encoded,
    Encoder,
    Subject,
    dump_pickle,
    dump_safely,
)
from .tensor_paths import Part, describe_first

COMPILED, PICKLED, SAFE_COMPILED, SAFE, CUSTOM = 1, 2, 3, 4, 5
_NO_NAMES: tuple[str, ...] = ()
_MOST_TEXT = 10_000  # of a failure that is too large to be sent as it is


class Manner(NamedTuple):
    """How messages to one worker are encoded."""

    plain: bool = False
    """It accepts no pickles."""
    same_main: bool = False
    """It runs the same script, so what that defines can go by name."""
    to: int = -1
    """Who it is."""
    devices: DeviceMaps = DeviceMaps()
    """On which devices tensors arrive there."""

    def with_map(self, pairs: Mapping[str, str]) -> Manner:
        """That of the result of a call with this device map."""
        devices = DeviceMaps(responses=for_result(pairs))
        return Manner(self.plain, self.same_main, self.to, devices)


class Codec:
    """Encodes and decodes for one worker."""

    def __init__(
        self,
        limits: Limits,
        *,
        plain_only: bool = False,
        custom: Serializer | None = None,
        keep_gaps: bool = False,
    ) -> None:
        self._limits = limits
        self._plain_only = plain_only
        self._custom = custom
        self._keep_gaps = keep_gaps
        self._names = Names()
        self._reducers: dict[type, Reducer] = {}
        self._replaced: frozenset[type] = frozenset()
        self._replacing: Replacing | None = None
        self._restoring: Restoring | None = None
        self._kinds: dict[type, int] = {Call: CALL}
        self._fields: dict[type, GetFields] = {}
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

    def register(self, kind: int, message: type) -> None:
        """Register a message type of an upper layer: a dataclass."""
        if kind < FIRST_UPPER or kind > 255 or kind in self._types:
            raise ValueError(f"message code {kind} is already used or not in 16..255")
        self._kinds[message] = kind
        self._types[kind] = message
        if not issubclass(message, TensorMessage):
            self._fields[message] = getter(message)

    def register_reducer(self, kind: type, reducer: Reducer) -> None:
        """Pickle objects of exactly this type with `reducer`, as `copyreg` would."""
        self._reducers[kind] = reducer

    def replace(
        self,
        kinds: Iterable[type],
        width: int,
        replacing: Replacing,
        restoring: Restoring,
    ) -> None:
        """Send objects of exactly these types as that many numbers.

        Called for a message with such objects, or one that may contain some: `replacing(to,
            is_reply)`,
        `restoring(sender)`.
        """
        self._replaced = frozenset(kinds)
        self._replacing, self._restoring = replacing, restoring
        self._encoders[False].replace(self._replaced, width, replacing)
        if COMPILED in self._decoders:
            self._decoders[COMPILED].restore(width, restoring)

    def call(self, call: Call, manner: Manner, *, is_traced: bool = False) -> Encoded:
        """Encode a call, or a message of an upper layer that is one.

        `is_traced`: its tensors that require grad will have a history where they arrive.

        Raises:
            TypeError: an argument cannot be sent.
            ValueError: it is larger than the limits.
        """
        kind, devices = self._kinds[type(call)], manner.devices.requests
        name, own_map = call.function, call.device_map
        if type(name) is not str:
            is_enough = manner.plain or self._custom is not None
            same = manner.same_main
            name = self._names.name_of(name, same, is_enough=is_enough)
        if name is not None and self._custom is None and own_map is None:
            values, names = call.args, _NO_NAMES
            if call.kwargs:
                values, names = (*values, *call.kwargs.values()), tuple(call.kwargs)
            subject = (name, names, call.modes)
            if kind != CALL:
                values = (call.ids, *values)
            encoded = self._compiled(kind, subject, values, manner, devices)
            if encoded is not None:
                return encoded
        if name is None and manner.plain:
            raise NotAllowedError(
                f"{call.function!r} cannot be imported by name, and the worker called "
                "accepts no functions by value (it has an allow-list)"
            )
        target = call.function if name is None else name
        fields: tuple[Any, ...] = (target, call.args, call.kwargs, call.modes, call.ids)
        if own_map is not None:
            fields, devices = (*fields, own_map), for_call(own_map)
        try:
            return self._general(kind, fields, manner, devices, is_traced=is_traced)
        except UnlistedError as error:
            given = [*enumerate(call.args), *call.kwargs.items()]
            parts = [(f"argument {key!r}", value) for key, value in given]
            what = f" (in a call of {describe(call.function)})"
            raise _located(error, parts, devices, what) from error
        except (RecursionError, pickle.PicklingError) as error:
            if "recursion" not in str(error):
                raise
            what = describe(call.function)
            raise TypeError(f"arguments of {what} nest too deep") from error

    def result(self, value: Any, manner: Manner, *, is_traced: bool = False) -> Encoded:
        """Encode a result."""
        if type(value) is TensorMessage:
            return self._tensor_message(RESULT, value, manner)
        devices = manner.devices.responses
        if self._custom is None:
            encoded = self._compiled(RESULT, NO_SUBJECT, (value,), manner, devices)
            if encoded is not None:
                return encoded
        try:
            return self._general(RESULT, (value,), manner, devices, is_traced=is_traced)
        except UnlistedError as error:
            raise _located(error, [("result", value)], devices) from error

    def failure(
        self, error: BaseException, manner: Manner, trace: str | None = None
    ) -> Parcel:
        """Encode an exception: itself, if it can be pickled, and its text in any case."""
        same = manner.same_main
        pickler = PickleSerializer(self._reducers, same_main=same)
        failure = describe_failure(error, None if manner.plain else pickler, trace)
        try:
            return self._general(FAILURE, fields_of_failure(failure), manner)[0]
        except Exception:  # noqa: BLE001 user code; or it is larger than the limits
            short = shorten(failure, min(_MOST_TEXT, self._limits.body // 16))
            return self._general(FAILURE, fields_of_failure(short), manner)[0]

    def message(
        self, message: Any, manner: Manner, *, is_traced: bool = False
    ) -> Encoded:
        """Encode a message of an upper layer."""
        kind = self._kinds[type(message)]
        fields_of = self._fields.get(type(message))
        if fields_of is None:
            return self._tensor_message(kind, message, manner)
        fields = fields_of(message)
        devices = manner.devices.requests
        encoded = self._compiled(kind, NO_SUBJECT, fields, manner, devices)
        if encoded is not None:
            return encoded
        return self._general(kind, fields, manner, devices, is_traced=is_traced)

    def _compiled(
        self,
        kind: int,
        subject: Subject,
        values: Sequence[Any],
        manner: Manner,
        devices: DeviceMap | None,
    ) -> Encoded | None:
        """The message encoded by its signature, if it has one."""
        if devices is not None and devices.moves_cpu:
            return None
        return self._encoders[manner.plain].encode(kind, subject, values, manner.to)

    def _tensor_message(
        self, kind: int, message: TensorMessage, manner: Manner
    ) -> Encoded:
        devices = manner.devices.gradients
        if devices is None or not devices.moves_cpu:
            parcel = self._encoders[manner.plain].encode_tensors(kind, message)
            if parcel is not None:
                return parcel, (), None
        return self._general(kind, message.unshared(), manner, devices)

    def open(self, frame: Frame, sender: int = -1) -> Opened:
        """The message in a frame.

        Raises:
            ProtocolError: the bytes are malformed.
            NotAllowedError: it holds a pickle, and this worker accepts none.
            Exception: whatever unpickling it raises.
        """
        decoder = self._decoders.get(frame.encoding)
        if decoder is not None:
            return decoder.decode(frame, sender)
        loader = self._loaders.get(frame.encoding)
        if loader is None:
            raise self._refusal(frame.encoding)
        restored = self._restoring and self._restoring(sender)
        beside = Beside(restore=restored)
        if frame.encoding == PICKLED:
            loader = PickleSerializer(self._reducers, same_main=True, beside=beside)
        with streams.for_others():
            return self._open_general(frame, loader, beside, restored)

    def _open_general(
        self, frame: Frame, loader: Serializer, beside: Beside, restored: Any
    ) -> Opened:
        body = memoryview(frame.body)
        most = self._limits.body + self._limits.bulk
        arrived, at = dense_tensors.unpack(body, frame.area, most, frame.on_device)
        fields = loader.loads(body[at:], arrived)
        traced: list[torch.Tensor] = []
        if frame.scope and frame.mark:
            noted = [tensor for _, tensor in sorted(beside.traced.items())]
            traced = noted or _requiring_grad(arrived)
            if len(arrived) > 1:
                _set_apart(traced, arrived)
        return self._from_fields(frame.kind, fields), traced, restored

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

    def _general(
        self,
        kind: int,
        fields: tuple[Any, ...],
        manner: Manner,
        devices: DeviceMap | None = None,
        *,
        is_traced: bool = False,
    ) -> Encoded:
        found: list[torch.Tensor] = []
        replaced = self._replacing and self._replacing(manner.to, kind == RESULT)
        beside = Beside(self._replaced, replaced, is_traced=is_traced, devices=devices)
        encoding, serializer = self._serializer(manner, beside)
        try:
            data = serializer.dumps(fields, found)
            if encoding == CUSTOM and not all(map(dense_tensors.is_plain, found)):
                raise TypeError(
                    "a serializer can put only dense CPU tensors beside its bytes"
                )
            packed = dense_tensors.pack(found, keep_gaps=self._keep_gaps)
            parcel = Parcel(kind, encoding, b"".join((*packed.head, data)))
            parcel.with_bulk(packed.bulk, packed.bulk_length).check(self._limits)
            parcel.device_at = packed.device_at
        except BaseException:
            if replaced is not None:
                replaced.take_back()
            raise
        traced = list(beside.traced.values())
        if is_traced and not traced:  # not one of our pickles
            traced = _requiring_grad(found)
        return parcel, traced, replaced

    def _serializer(self, manner: Manner, beside: Beside) -> tuple[int, Serializer]:
        if manner.plain:
            return SAFE, safe_encoding.SafeSerializer(beside.devices)
        if self._custom is not None:
            return CUSTOM, self._custom
        same = manner.same_main
        return PICKLED, PickleSerializer(self._reducers, same_main=same, beside=beside)


def _located(
    error: UnlistedError,
    parts: list[Part],
    devices: DeviceMap | None,
    what: str = "",
) -> ValueError:
    """The same error, saying which tensor it is."""
    assert devices is not None  # it has refused one
    tensor = describe_first(parts, lambda tensor: not devices.has(tensor.device))
    return ValueError(f"{tensor} is {error.where}{what}")


def _requiring_grad(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that require grad."""
    return [v for v in values if type(v) is torch.Tensor and v.requires_grad]


def _set_apart(found: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
    """Give each tensor that gets a history its own memory.

    If they shared memory, modifying one in place would modify others without autograd noticing.
    """
    shares = Counter(map(raw_bytes.place, arrived))
    for tensor in found:
        if shares[raw_bytes.place(tensor)] > 1:
            tensor.data = tensor.data.clone()
