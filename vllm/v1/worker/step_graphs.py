# SPDX-License-Identifier: Apache-2.0
"""Which steps replay a graph: decodes whole ones, other short steps ones split at graph breaks.

A graph reads the staged arrays, whose device side has a fixed address, so a step uploads its
arrays as always and replays. Steps are padded to the next captured size; padded rows have slot and
state index -1 and context length 0, which kernels skip. All captures share one memory pool, which
is safe because one stream runs them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from tqdm import tqdm

from vllm.utils.imports import gc_paused
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.graph_set import GraphSet


@dataclass(frozen=True)
class Replay:
    """What a step of decodes of `width` tokens replays: the capture of `size` decodes if it is
    `whole`, model and language-model head in one graph; else of `size` tokens, the model in pieces.
    """

    size: int
    whole: bool
    width: int = 1

    @property
    def num_tokens(self) -> int:
        return self.size * self.width if self.whole else self.size


class StepGraphs:
    """The captures of a runner.

    `capture_next()` captures one pending size and says whether it found one; steps use only what is
    captured, so captures may happen at start-up or between steps, in any number. `num_pending`
    sizes are left; the ones that serve every step come first. A step of more than `max_prefills`
    prefills replays no pieces (None: there is no limit). `decodes` and `pieces` are by width;
    `others` are captured here and replayed by their owner, the drafter.
    """

    def __init__(
        self,
        decodes: Mapping[int, GraphSet] | None = None,
        pieces: Mapping[int, GraphSet] | None = None,
        max_prefills: int | None = None,
        others: Sequence[GraphSet] = (),
    ) -> None:
        self._decodes = dict(decodes or {})
        self._pieces = dict(pieces or {})
        self._max_prefills = max_prefills
        self._others = list(others)

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes of steps of one token per request, ascending."""
        return self._decodes[1].sizes if self._decodes else []

    @property
    def piecewise_sizes(self) -> list[int]:
        """Captured sizes of other steps whose decodes have one token, in tokens, ascending."""
        return self._pieces[1].sizes if self._pieces else []

    @property
    def num_captured(self) -> int:
        return sum(len(graphs.sizes) for graphs in self._sets())

    @property
    def num_pending(self) -> int:
        return sum(len(graphs.pending) for graphs in self._sets())

    def replay_for(self, shape: StepShape) -> Replay | None:
        """What a step replays; None: it runs eagerly."""
        decodes, pieces = self._decodes.get(shape.width), self._pieces.get(shape.width)
        if shape.decode_only and decodes is not None:
            size = decodes.size_for(shape.num_reqs)
            if size is not None:
                return Replay(size, True, shape.width)
        fits = self._max_prefills is None or shape.num_prefills <= self._max_prefills
        if pieces is not None and fits:
            size = pieces.size_for(shape.num_tokens)
            if size is not None:
                return Replay(size, False, shape.width)
        return None

    def replay(self, chosen: Replay) -> Tensor:
        """Launch it: logits `[tokens, vocab]` if whole, else hidden states `[tokens, hidden]`.

        The next replay overwrites them.
        """
        graphs = self._decodes if chosen.whole else self._pieces
        return graphs[chosen.width].replay(chosen.size)

    def capture_next(self) -> bool:
        """Capture one pending size; False when none is left."""
        for graphs in self._sets():
            if graphs.pending:
                # A collection inside a capture could free what it may not touch.
                with gc_paused():
                    graphs.capture(graphs.pending[0])
                return True
        return False

    def capture_all(self) -> None:
        """Capture every pending size."""
        if not self.num_pending:
            return
        for _ in tqdm(range(self.num_pending), desc="capturing graphs", unit="graph"):
            self.capture_next()

    def _sets(self) -> list[GraphSet]:
        """Fewest captures first: all sets get their coarse sizes before any is complete."""
        found = [*self._decodes.values(), *self._pieces.values(), *self._others]
        return sorted(found, key=lambda graphs: len(graphs.sizes))
