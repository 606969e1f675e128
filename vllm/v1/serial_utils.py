# SPDX-License-Identifier: Apache-2.0
"""Bytes between the front end and the engine core: msgpack, with pickle for what it lacks.

Both ends are processes of one program that talk over sockets in a private directory; nothing a
remote client sends is ever unpickled. Functions are the exception: they run code by design, so
sending one needs `VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import cloudpickle
import msgspec
import numpy as np

from vllm import envs
from vllm.v1.engine import WireLogprobs
from vllm.v1.outputs import LogprobsLists

_EXT_PICKLE = 1
_EXT_FUNCTION = 2
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)

T = TypeVar("T")


def _has_function(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_function, value))
    if isinstance(value, dict):
        return any(map(_has_function, value.values()))
    return isinstance(value, _FUNCTIONS)


def _encode_unknown(value: Any) -> msgspec.msgpack.Ext:
    if _has_function(value):
        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise TypeError(
                f"sending a function ({value!r}) to the engine process is off by default; set "
                "VLLM_ALLOW_INSECURE_SERIALIZATION=1, or VLLM_ENABLE_V1_MULTIPROCESSING=0 to run "
                "the engine in this process, or name a method of the worker"
            )
        return msgspec.msgpack.Ext(_EXT_FUNCTION, cloudpickle.dumps(value))
    return msgspec.msgpack.Ext(_EXT_PICKLE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


_PLAIN = (bool, int, float, str, bytes, type(None))


def pack_object(value: Any) -> Any:
    """`value` in a form that arrives with its exact type (msgpack alone loses tuples, sets ...)."""
    return value if type(value) in _PLAIN else _encode_unknown(value)


def _decode_ext(code: int, data: memoryview) -> Any:
    if code == _EXT_FUNCTION and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise TypeError("received a function, but VLLM_ALLOW_INSECURE_SERIALIZATION is not set")
    if code in (_EXT_PICKLE, _EXT_FUNCTION):
        return pickle.loads(data)
    raise ValueError(f"unknown msgpack extension {code}")


class MsgpackEncoder:
    """Messages to bytes; one instance per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_unknown)
        self.encode: Callable[[Any], bytes] = self._encoder.encode


class MsgpackDecoder(Generic[T]):
    """Bytes to messages of one type; `msgspec.ValidationError` when they do not match."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, ext_hook=_decode_ext)
        self.decode: Callable[[bytes | memoryview], T] = self._decoder.decode


def logprobs_to_wire(lists: LogprobsLists) -> WireLogprobs:
    """Host arrays `[rows, width]` -> raw bytes."""
    rows, width = lists.token_ids.shape
    return WireLogprobs(
        rows,
        width,
        lists.token_ids.astype("<i4", copy=False).tobytes(),
        lists.logprobs.astype("<f4", copy=False).tobytes(),
        lists.ranks.astype("<i4", copy=False).tobytes(),
    )


def logprobs_from_wire(wire: WireLogprobs) -> LogprobsLists:
    """The inverse of `logprobs_to_wire`: int32, fp32 `[rows, width]` and int32 `[rows]`."""
    shape = (wire.rows, wire.width)
    return LogprobsLists(
        np.frombuffer(wire.token_ids, dtype="<i4").reshape(shape),
        np.frombuffer(wire.logprobs, dtype="<f4").reshape(shape),
        np.frombuffer(wire.ranks, dtype="<i4"),
    )
