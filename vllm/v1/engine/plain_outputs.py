# SPDX-License-Identifier: Apache-2.0
"""Most of what a step sends is one token for each of the same requests as in the step before. On
the wire that is one array, and the requests' ids only when they change."""

from __future__ import annotations

from array import array
from itertools import chain

import msgspec
import numpy as np

from vllm.v1.engine import EngineCoreOutputs, PlainOutputs

_TYPECODE = "i"
assert array(_TYPECODE).itemsize == 4


class PlainOutputsPacker:
    """Replaces plain outputs by arrays; one per receiver, whose messages all go through it."""

    def __init__(self) -> None:
        self._request_ids: list[str] = []

    def pack(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The message to send; `outputs` itself stays as it is."""
        num_plain = outputs.num_plain
        if not num_plain:
            return outputs
        rows = outputs.outputs[:num_plain]
        request_ids = [row.request_id for row in rows]
        tokens = [row.new_token_ids for row in rows]
        flat = array(_TYPECODE, chain.from_iterable(tokens))
        counts = None
        if len(flat) != num_plain:
            counts = array(_TYPECODE, map(len, tokens)).tobytes()
        known = request_ids == self._request_ids
        self._request_ids = request_ids
        return msgspec.structs.replace(
            outputs,
            outputs=outputs.outputs[num_plain:],
            num_plain=0,
            plain=PlainOutputs(flat.tobytes(), counts, None if known else request_ids),
        )


class PlainOutputsUnpacker:
    """Fills in the ids that a message leaves out; sees all messages of one packer, in order."""

    def __init__(self) -> None:
        self._request_ids: list[str] | None = None

    def unpack(self, outputs: EngineCoreOutputs) -> None:
        """Give the message's plain outputs their ids: the same list object while they are the
        same."""
        if outputs.plain is None:
            return
        if outputs.plain.request_ids is None:
            outputs.plain.request_ids = self._request_ids
        self._request_ids = outputs.plain.request_ids


def plain_tokens(plain: PlainOutputs) -> list[int]:
    """All tokens, in the order of the requests."""
    tokens: list[int] = np.frombuffer(plain.token_ids, dtype=np.int32).tolist()
    return tokens


def split_tokens(plain: PlainOutputs) -> list[list[int]]:
    """The tokens of each request."""
    tokens = plain_tokens(plain)
    if plain.counts is None:
        return [[token] for token in tokens]
    ends = np.frombuffer(plain.counts, dtype=np.int32).cumsum().tolist()
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
