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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

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
from vllm.utils.waiting import waiting_for
from vllm.v1.worker.input_batch import StepOrder

#: messages with a step's streams that a stage may be ahead of the next one
_BUFFERS = 3
#: what a stage waits for
_TAKEN, _SENT = "another stage to take a message", "a message of another stage"

#: `(sample_requests [n, 4], sampled [n])`: see `AcceptProblem`
Accept = Callable[[Tensor, Tensor], object]


@dataclass
class _Outgoing:
    """A buffer, and the sends that read it."""

    buffer: Tensor
    works: list[dist.Work] = field(default_factory=list)


class _Outbox:
    """Sends copies, so that a step's tensors may be written by the next one. A buffer is free again
    when its message is received, `depth` messages later at the latest."""

    def __init__(
        self, group: GroupCoordinator, targets: range, make: Callable[[], Tensor], depth: int
    ) -> None:
        self._group, self._targets = group, targets
        self._ring = deque(_Outgoing(make()) for _ in range(depth))

    def send(self, x: Tensor) -> None:
        """`x [n, ...]` to every target."""
        slot = self._ring[0]
        self._ring.rotate(-1)
        with waiting_for(_TAKEN):
            for work in slot.works:
                work.wait()
        message = slot.buffer[: len(x)]
        message.copy_(x)
        slot.works = [self._group.isend(message, target) for target in self._targets]


@dataclass
class _Incoming:
    """A buffer, the message on its way to it, and when that was copied or read."""

    buffer: Tensor
    taken: torch.cuda.Event | None
    message: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """The message, in the order of this stream."""
        assert self.work is not None, "nothing was posted"
        with waiting_for(_SENT):
            self.work.wait()
        return self.message

    def release(self) -> None:
        """What this stream has been given by now was the last to read it."""
        if self.taken is not None:
            self.taken.record()


class _Inbox:
    """Receives into buffers, on a stream of its own where there are streams: a message crosses
    while other steps are computed. Whatever is sent is received at once, so that no send is left
    pending when no step is in flight."""

    def __init__(
        self, group: GroupCoordinator, source: int, make: Callable[[], Tensor], depth: int
    ) -> None:
        self._group, self._source = group, source
        buffers = [make() for _ in range(depth)]
        cuda = buffers[0].device.type == "cuda"
        self._stream = torch.cuda.Stream(buffers[0].device) if cuda else None
        self._ring = deque(
            _Incoming(buffer, torch.cuda.Event() if cuda else None, buffer) for buffer in buffers
        )

    def post(self, count: int) -> _Incoming:
        """Begin to receive the next message, `count` rows."""
        slot = self._ring[0]
        self._ring.rotate(-1)
        slot.message = slot.buffer[:count]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and slot.taken is not None:
                self._stream.wait_event(slot.taken)
            slot.work = self._group.irecv(slot.message, self._source)
        return slot


@dataclass(frozen=True)
class _Sampling:
    """Samples that were not taken in yet: their batch rows on the host, and what `accept` wants.

    `sample_requests` is a copy: the step's own array is filled again by the next one.
    """

    rows: np.ndarray
    sampled: _Incoming
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
        new = partial(torch.zeros, dtype=dtype, device=device)
        rows = partial(torch.zeros, max_rows, dtype=torch.int64, device=device)
        depth = steps_in_flight + 1
        if not self.is_first:
            #: what the model reads, at a fixed address for graphs: `[streams, tokens, hidden]`
            self._incoming = new(streams_in, tokens, hidden)
            messages = partial(new, tokens, streams_in, hidden)
            self._from_previous = _Inbox(forward, self.rank - 1, messages, _BUFFERS)
        if not self.is_last:
            self._first_message = new(1, streams_out, hidden)
            messages, following = partial(new, tokens, streams_out, hidden), self.rank + 1
            self._to_next = _Outbox(forward, range(following, following + 1), messages, _BUFFERS)
            self._nothing = rows()
            self._from_last = _Inbox(back, self.size - 1, rows, depth)
        else:
            self._to_earlier = _Outbox(back, range(self.size - 1), rows, depth)
        self._meet()

    def _meet(self) -> None:
        """Open every channel: the first message of one may wait for its other end."""
        if not self.is_first:
            self.receive(1)
        if not self.is_last:
            self.send(self._first_message)
            sampled = self._from_last.post(1)
            sampled.wait()
            sampled.release()
        else:
            self.send_sampled(self._incoming.new_zeros(1, dtype=torch.int64))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Steps inside the block are this stage's alone: nothing is sent or received."""
        self._connected = False
        try:
            yield
        finally:
            self._connected = True

    def make_up_incoming(self, seed: int) -> None:
        """For a step of this stage alone: streams in the place of those of the stage before."""
        if not self.is_first:
            source = torch.Generator(self._incoming.device).manual_seed(seed)
            self._incoming.normal_(generator=source)

    # ---- forward -------------------------------------------------------------------------------

    def receive(self, num_tokens: int) -> None:
        """Get a step's streams from the stage before; `incoming` are then these."""
        if self._connected and not self.is_first:
            arriving = self._from_previous.post(num_tokens)
            self._incoming[:, :num_tokens].copy_(arriving.wait().transpose(0, 1))
            arriving.release()

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
            sampled = self._from_last.post(count)
            self._waiting.append(_Sampling(rows, sampled, sample_requests.clone()))
        else:
            accept(sample_requests, self._nothing[:count])

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
            accept(waiting.sample_requests, waiting.sampled.wait())
            waiting.sampled.release()
