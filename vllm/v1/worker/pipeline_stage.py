# SPDX-License-Identifier: Apache-2.0
"""What a worker exchanges with the other stages of its pipeline, one message per step each way.

Forward, each stage hands the residual stream to the next. Back, the last stage sends what was
sampled to all earlier ones: each keeps the newest token and the progress of every row itself. A
stage takes sampled tokens in when a step is about to run a row that waits for some, so steps of
other requests go on meanwhile. All of it is outside of graphs, and the host waits for none of it
on a GPU; with gloo a receive waits on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_pp_back_group,
    get_pp_group,
)
from vllm.model_executor.models.decoder import CAPTURED, STREAM
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.input_batch import StepOrder

#: `(sample_requests [n, 4], sampled [n])`: see `AcceptProblem`
Accept = Callable[[Tensor, Tensor], object]


@dataclass
class _Outgoing:
    """A buffer, and the sends that read it."""

    buffer: Tensor
    works: list[dist.Work] = field(default_factory=list)


class _Outbox:
    """Sends copies, so that a step's tensors may be written by the next one. There are more
    buffers than steps in flight: whoever gets one waits for nothing."""

    def __init__(self, group: GroupCoordinator, targets: range, buffer: Tensor, depth: int) -> None:
        self._group, self._targets = group, targets
        self._ring = deque(_Outgoing(torch.empty_like(buffer)) for _ in range(depth))

    def send(self, x: Tensor) -> None:
        """`x [n, ...]` to every target."""
        slot = self._ring[0]
        self._ring.rotate(-1)
        for work in slot.works:
            work.wait()
        message = slot.buffer[: len(x)]
        message.copy_(x)
        slot.works = [self._group.isend(message, target) for target in self._targets]


class _Inbox:
    """Receives into a buffer, on a stream of its own where there are streams: a message crosses
    while the step before is still computed."""

    def __init__(self, group: GroupCoordinator, source: int, buffer: Tensor) -> None:
        self._group, self._source, self._buffer = group, source, buffer
        cuda = buffer.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffer.device) if cuda else None
        #: the last message was copied out of the buffer
        self._taken = torch.cuda.Event() if cuda else None

    def receive(self, count: int, target: Tensor) -> None:
        """Put the next message, `count` rows, into `target`, in the order of this stream."""
        message = self._buffer[:count]
        if self._stream is None or self._taken is None:
            self._group.irecv(message, self._source).wait()
            target.copy_(message)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken)
            self._group.irecv(message, self._source).wait()
        torch.cuda.current_stream(target.device).wait_stream(self._stream)
        target.copy_(message)
        self._taken.record()


@dataclass(frozen=True)
class _Sampling:
    """Tokens that were not taken in yet: batch rows on the host, and what `accept` wants of them.

    `sample_requests` is a copy: the step's own array is filled again by the next one.
    """

    rows: np.ndarray
    num_sampled: int
    sample_requests: Tensor


class PipelineStage:
    """Place `rank` of `size` stages, and the channels to the others.

    `streams_in`, `streams_out`: tensors that it gets from the stage before and gives to the next,
    the residual stream and those captured so far, each `[tokens, hidden]`. `steps_in_flight`: see
    `VllmConfig`. Made by all stages at once, which meet here.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        steps_in_flight: int,
        streams_in: int,
        streams_out: int,
    ) -> None:
        """`shape`: most tokens of a step, hidden size."""
        forward, back = get_pp_group(), get_pp_back_group()
        self.rank, self.size = forward.rank_in_group, forward.world_size
        self.is_first, self.is_last = forward.is_first_rank, forward.is_last_rank
        self._max_waiting = steps_in_flight
        self._waiting: deque[_Sampling] = deque()
        self._connected = True
        tokens, hidden = shape
        rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        depth = steps_in_flight + 1
        if not self.is_first:
            #: what the model reads, at a fixed address for graphs: `[streams, tokens, hidden]`
            self._incoming = torch.zeros(streams_in, tokens, hidden, dtype=dtype, device=device)
            buffer = torch.empty(tokens, streams_in, hidden, dtype=dtype, device=device)
            self._from_previous = _Inbox(forward, self.rank - 1, buffer)
        if not self.is_last:
            buffer = torch.empty(tokens, streams_out, hidden, dtype=dtype, device=device)
            self._to_next = _Outbox(forward, range(self.rank + 1, self.rank + 2), buffer, depth)
            self._sampled = torch.zeros_like(rows)
            self._from_last = _Inbox(back, self.size - 1, rows)
        else:
            self._to_earlier = _Outbox(back, range(self.size - 1), rows, depth)
        self._meet()

    def _meet(self) -> None:
        """Open every channel: the first message of one may wait for its other end."""
        if not self.is_first:
            self._from_previous.receive(1, self._incoming[:, :1].transpose(0, 1))
        if not self.is_last:
            self.send(self._to_next._ring[0].buffer[:1].zero_())
            self._from_last.receive(1, self._sampled[:1])
        else:
            self._to_earlier.send(self._incoming.new_zeros(1, dtype=torch.int64))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Steps inside the block are this stage's alone: nothing is sent or received."""
        self._connected = False
        try:
            yield
        finally:
            self._connected = True

    # ---- forward -------------------------------------------------------------------------------

    def receive(self, num_tokens: int) -> None:
        """Get a step's streams from the stage before; `incoming` are then these."""
        if self._connected and not self.is_first:
            target = self._incoming[:, :num_tokens].transpose(0, 1)
            self._from_previous.receive(num_tokens, target)

    def incoming(self, num_tokens: int) -> IntermediateTensors | None:
        """What the model takes for `num_tokens` tokens, padding included; None on the first
        stage."""
        if self.is_first:
            return None
        stream, *captured = self._incoming[:, :num_tokens].unbind(0)
        named = {CAPTURED.format(i): one for i, one in enumerate(captured)}
        return IntermediateTensors({STREAM: stream, **named})

    @staticmethod
    def packed(output: IntermediateTensors) -> Tensor:
        """What the model of a stage before the last returned, as `[tokens, streams, hidden]`."""
        num_captured = len(output) - 1
        if not num_captured:
            return output[STREAM].unsqueeze(1)
        captured = [output[CAPTURED.format(i)] for i in range(num_captured)]
        return torch.stack([output[STREAM], *captured], dim=1)

    def send(self, packed: Tensor) -> None:
        """Give the next stage a step's `[tokens, streams, hidden]`."""
        if self._connected:
            self._to_next.send(packed)

    # ---- back ----------------------------------------------------------------------------------

    def send_sampled(self, tokens: Tensor) -> None:
        """The last stage: tell the earlier ones what was sampled, `[n]` int64."""
        if self._connected:
            self._to_earlier.send(tokens)

    def await_sampled(self, order: StepOrder, sample_requests: Tensor, accept: Accept) -> None:
        """An earlier stage: the step's samples are taken in before its rows run again. In a step
        of this stage alone they are 0, and taken in at once."""
        rows = order.rows[order.sampling]
        if not len(rows):
            return
        count = int(order.num_samples.sum())
        if self._connected:
            self._waiting.append(_Sampling(rows, count, sample_requests.clone()))
        else:
            accept(sample_requests, self._sampled[:count].zero_())

    def take_sampled(self, order: StepOrder, accept: Accept) -> None:
        """Before a step: take in the samples of earlier steps up to the last that runs one of its
        rows, and of those whose results the host has."""
        if not self._connected:
            return
        needed = max(len(self._waiting) - self._max_waiting + 1, 0)
        for i, waiting in enumerate(self._waiting):
            if np.isin(waiting.rows, order.rows).any():
                needed = max(needed, i + 1)
        for _ in range(needed):
            waiting = self._waiting.popleft()
            sampled = self._sampled[: waiting.num_sampled]
            self._from_last.receive(waiting.num_sampled, sampled)
            accept(waiting.sample_requests, sampled)
