# SPDX-License-Identifier: Apache-2.0
"""Which sizes are captured, given what the layers, the connector and the state memory allow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from vllm import decisions
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.arena_sizing import largest, pages_per_request
from vllm.v1.core.sched.draft_policy import step_cost
from vllm.v1.kv_cache_interface import KVCacheConfig

#: time that a step of a width between the others' may take at most, by that without padding: of
#: decodes, and beside prefills, where there are few steps
_PADDED, _PADDED_MIXED = 1.2, 1.5


@dataclass(frozen=True)
class GraphPlan:
    """Sizes to capture, ascending: decode steps whole (requests), others in pieces (tokens); all of
    them for decodes of the first and the last of the `widths` (tokens, ascending), which are one
    token and all drafts, and fewer for those between.

    Each size costs its capture for every width, and what a width between gains over its neighbours
    is no more than what coarse sizes lose: so a step there may take `_PADDED` of what it would take
    without padding, by the policy's costs of steps. That leaves most small sizes out, for few
    tokens are nearly as quick as one.

    `max_prefills`: in a step that replays pieces; None: any number.
    """

    decode_sizes: list[int]
    piecewise_sizes: list[int]
    max_prefills: int | None = None
    widths: tuple[int, ...] = (1,)

    @property
    def sizes(self) -> list[int]:
        return self.decode_sizes + self.piecewise_sizes

    def decode_sizes_of(self, width: int) -> list[int]:
        """Sizes of whole steps of decodes of `width` tokens, in requests."""
        return self._sizes_of(width, self.decode_sizes, width, _PADDED)

    def piecewise_sizes_of(self, width: int) -> list[int]:
        """Sizes of other steps whose decodes have `width` tokens, in tokens."""
        return self._sizes_of(width, self.piecewise_sizes, 1, _PADDED_MIXED)

    def _sizes_of(self, width: int, sizes: list[int], tokens: int, most: float) -> list[int]:
        """Those of `sizes`, each of so many `tokens`, that are captured for a width, so that none
        takes more than `most` of its time without padding."""
        if width in (self.widths[0], self.widths[-1]):
            return sizes
        kept: list[int] = []
        for smaller, size in reversed(list(pairwise([0, *sizes]))):
            # Without this size the least step that it is for would run as the one above.
            least = step_cost((smaller + 1) * tokens)
            if not kept or step_cost(kept[0] * tokens) > most * least:
                kept.insert(0, size)
        return kept


def full_graphs_forbidden(
    vllm_config: VllmConfig, backends: list[type[AttentionBackend]]
) -> str | None:
    """Why decode steps cannot be captured whole, or None."""
    for backend in backends:
        if not backend.supports_full_graph:
            return f"attention backend {backend.name} supports no graph of a whole step"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        connector = KVConnectorFactory.get_connector_class(transfer)
        if connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config):
            return f"connector {transfer.kv_connector} acts on every layer"
    return None


def most_sequences(kv_cache_config: KVCacheConfig, limit: int) -> int:
    """How many sequences, up to `limit`, the state memory holds at their shortest."""
    groups, plan = kv_cache_config.kv_cache_groups, kv_cache_config.plan

    def fits(count: int) -> bool:
        return pages_per_request(groups, plan, 1, count, 1) < plan.num_pages

    return largest(limit, fits)


def plan_graphs(
    vllm_config: VllmConfig,
    backends: list[type[AttentionBackend]],
    kv_cache_config: KVCacheConfig,
) -> GraphPlan:
    """The sizes of the configured mode; what cannot be honoured is a decision.

    ValueError when sizes were given that are larger decode batches than the state memory holds.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode or CUDAGraphMode.NONE
    pieces = list(compilation.piecewise_capture_sizes)
    limits = [b.max_prefills_in_graph for b in backends if b.max_prefills_in_graph is not None]
    max_prefills = min(limits, default=None)
    widths = vllm_config.step_widths
    if not mode.decode_is_full:
        return GraphPlan([], pieces, max_prefills, widths)
    reason = full_graphs_forbidden(vllm_config, backends)
    if reason is not None:
        instead = CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE
        decisions.record("cudagraph_mode", instead.name, reason, mode.name)
        return GraphPlan([], pieces, max_prefills, widths)
    sizes = _decode_sizes(vllm_config, kv_cache_config)
    return GraphPlan(sizes, pieces, max_prefills, widths)


def _decode_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[int]:
    compilation = vllm_config.compilation_config
    sizes = list(compilation.decode_capture_sizes)
    if not sizes:
        return []
    most = most_sequences(kv_cache_config, sizes[-1])
    if most == sizes[-1]:
        return sizes
    if compilation.capture_sizes_given:
        raise VLLMValidationError(
            f"--cudagraph-capture-sizes asks for decode steps of {sizes[-1]} requests, but the "
            f"state memory holds {most}; capture at most that, or give more memory"
        )
    kept = [size for size in sizes if size < most]
    decisions.record(
        "decode graphs",
        f"batches of up to {most}",
        "more sequences do not fit into the state memory",
        f"batches of up to {sizes[-1]}",
    )
    return [*kept, most] if most else kept
