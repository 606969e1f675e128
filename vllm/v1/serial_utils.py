# SPDX-License-Identifier: Apache-2.0
"""Bytes between the processes of an engine: msgpack, with pickle for what it lacks.

All of them are processes of one program that talk over sockets in a private directory; nothing a
remote client sends is ever unpickled. Functions are the exception: they run code by design, so
sending one needs `VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import cloudpickle
import msgspec
import numpy as np

from vllm import envs
from vllm.plugins import load_general_plugins
from vllm.transformers_utils.lean_import import without_model_classes
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


def pickle_setup(setup: Any) -> bytes:
    """What a new process starts from, for `unpickle_setup` there. Classes of checkpoints with
    remote code are sent by value: their module exists only here."""
    remote_code = sys.modules.get("transformers_modules")
    if remote_code is None:
        return cloudpickle.dumps(setup)
    cloudpickle.register_pickle_by_value(remote_code)
    try:
        return cloudpickle.dumps(setup)
    finally:
        cloudpickle.unregister_pickle_by_value(remote_code)


def unpickle_setup(setup: bytes) -> Any:
    """The inverse of `pickle_setup`; loads the plugins first, whose classes it may name."""
    load_general_plugins()
    # Remote code may well import model classes.
    lean = nullcontext() if b"transformers_modules" in setup else without_model_classes()
    with lean:
        return cloudpickle.loads(setup)


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
