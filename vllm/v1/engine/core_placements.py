# SPDX-License-Identifier: Apache-2.0
"""A supernet's placements while the engine lives: memory is planned for the mixers in use.

Requests may each choose a placement. Those with an alias have their memory from the start; another
one gets its part of the same pages when the first request comes with it. What is computed under one
placement is never found under another: each has groups of its own.

A change of the engine's own placement drops all state, so it waits until no request is left; the
weights of its mixers come to the device, those of others leave, and the memory is planned anew. Or
requests that do not choose have another one of those in use from then on, while those that run end
with theirs: then nothing is dropped and nothing planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from vllm import decisions
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.placements import Placement, as_text, why_one_at_a_time
from vllm.v1.core.arena_sizing import check_same_layers
from vllm.v1.core.placed_arena import BesideArena, PlacementSpecs, with_placement
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine.core_memory import CoreMemory
from vllm.v1.engine.late_captures import LateCaptures
from vllm.v1.engine.placements import PlacementChange
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

logger = init_logger(__name__)

#: spellings of placements that need not be looked up again, and the most characters of one
_NUM_REMEMBERED, _LONGEST_REMEMBERED = 4096, 4096


class CorePlacements:
    """Which placements requests choose from, and changing the engine's own: on all workers or none.

    `drain` takes the core through the steps that remain without a request. `config`: the memory
    that there is at the start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        scheduler: SchedulerInterface,
        executor: Executor,
        drain: Callable[[], None],
        memory: CoreMemory,
        config: KVCacheConfig,
        late_captures: LateCaptures,
    ) -> None:
        self._vllm_config = vllm_config
        self._scheduler, self._executor = scheduler, executor
        self._drain, self._memory, self._late_captures = drain, memory, late_captures
        assert vllm_config.model_config is not None
        self._aliases = vllm_config.model_config.placement_aliases
        self._most_unnamed = vllm_config.model_config.most_request_placements
        #: the engine's own before the last change, None if that changed nothing
        self._replaced: str | None = None
        #: whether requests wait for a place for their placement
        self.any_waits = False
        self._use(config)

    def _use(self, config: KVCacheConfig) -> None:
        self._config = config
        self._num_named = len(config.placements)
        #: indices by placement; those without an alias in the order of their last use
        self._live = {placed.placement: i for i, placed in enumerate(config.placements)}
        #: first group and groups that each may have
        self._regions = [(placed.first, placed.count) for placed in config.placements]
        #: of requests that do not choose, if they can
        self._own = next(iter(self._live), "")
        #: what callers wrote -> the placement
        self._spelled: dict[str | tuple[str, ...], str] = {}

    # ---- requests that choose ------------------------------------------------------------------

    def admit(self, placement: Placement) -> str:
        """A request is about to come with this placement, or its alias; returns its mixers, joined
        by commas. Nothing is changed.

        Raises `VLLMValidationError` for a placement that the model does not have, whose state does
        not fit into the pages of the arena, or that has no alias where it must have one; and where
        requests cannot choose.
        """
        if not self._config.placements:
            reason = why_one_at_a_time(self._vllm_config) or "the model is no supernet"
            raise VLLMValidationError(
                f"placement: requests cannot choose one: {reason}; leave it out", "placement"
            )
        spelled = self._spell(placement)
        if spelled not in self._live:
            if not self._most_unnamed:
                named = f"use {', '.join(self._aliases)} or " if self._aliases else ""
                raise VLLMValidationError(
                    f"placement {spelled} has no alias, and --max-request-placements 0 allows no "
                    f"other; {named}leave it out",
                    "placement",
                )
            self._planned(len(self._regions), spelled, len(self._config.kv_cache_groups))
            self._executor.collective_rpc("check_mixers", args=(spelled,))
        return spelled

    def assign(self, request: Request) -> None:
        """Give a request that comes in its placement, with the weights; it waits if there is no
        place for that. Raises as `admit`."""
        params = request.sampling_params
        if params is not None and params.placement is not None:
            spelled = self._bring(params.placement)
        elif self._live.get(self._own, 0) == 0:
            return
        else:
            spelled = self._own
        ahead = set(self._live.values()) if self.any_waits else self._of_waiting()
        self._give(request, spelled, ahead)

    def _bring(self, placement: Placement) -> str:
        """As `admit`, with the weights: they stay until the engine's own placement changes, so who
        waits for a place will find them."""
        spelled = self.admit(placement)
        if spelled not in self._live:
            self._executor.collective_rpc("fetch_mixers", args=(spelled,))
        return spelled

    def bring_in(self) -> None:
        """Give those that wait for a place what there is by now, in their order: a placement that
        only requests behind one use has to make room for it."""
        ahead: set[int] = set()
        self.any_waits = False
        for request in self._scheduler.waiting_requests():
            if request.awaits_placement:
                params = request.sampling_params
                asked = None if params is None else params.placement
                spelled = self._own if asked is None else self._spell(asked)
                if not self._give(request, spelled, ahead):
                    return
            ahead.add(request.placement)

    def _of_waiting(self) -> set[int]:
        return {request.placement for request in self._scheduler.waiting_requests()}

    def _give(self, request: Request, placement: str, ahead: Collection[int]) -> bool:
        """False if the request has to wait; placements of those `ahead` of it stay."""
        index = self._live.get(placement)
        if index is None:
            index = self._make_place(placement, ahead)
        request.awaits_placement = index is None
        if index is None:
            self.any_waits = True
            return False
        request.placement = index
        # The last one used is the last to go.
        self._live[placement] = self._live.pop(placement)
        return True

    def _spell(self, placement: Placement) -> str:
        # A list has names of mixers only: no alias, no short form.
        form = placement if isinstance(placement, str) else tuple(placement)
        if (spelled := self._spelled.get(form)) is None:
            asked = self._aliases.get(form, form) if isinstance(form, str) else form
            spelled, *_ = self._executor.collective_rpc("spell_placement", args=(asked,))
            if len(as_text(form)) > _LONGEST_REMEMBERED:
                return spelled
            if len(self._spelled) == _NUM_REMEMBERED:
                self._spelled.clear()
            self._spelled[form] = spelled
        return spelled

    def _make_place(self, placement: str, ahead: Collection[int]) -> int | None:
        """Give a placement its part of the arena, in the place of another one if there are too
        many, and return its index; None while all others are needed."""
        index, retired = len(self._regions), None
        first, room = len(self._config.kv_cache_groups), 0
        if self._num_places_taken() >= self._most_unnamed:
            retired = next((one for one in self._live if self._may_retire(one, ahead)), None)
            if retired is None:
                return None
            index = self._live.pop(retired)
            first, room = self._regions[index]
        config = self._planned(index, placement, first)
        if retired is not None and config.placements[index].count > room:
            config = self._planned(index, placement, len(self._config.kv_cache_groups))
        placed = config.placements[index]
        have_journals = self._executor.collective_rpc(
            "set_placement", args=(index, config, self._scheduler.take_block_log())
        )
        self._scheduler.set_placement(index, config)
        self._config = config
        self._regions[index : index + 1] = [(placed.first, max(room, placed.count))]
        self._live[placement] = index
        decisions.record(
            "graphs of a placement without an alias",
            f"none for {placement}, the last one that came",
            "name it with --placement-alias to have graphs from the start",
        )
        if not all(have_journals):
            decisions.record(
                "deferred commit of a placement without an alias",
                f"off for {placement}, the last one that came without room",
                "its journals are larger than those of the placements in use at the start; name "
                "it with --placement-alias, then memory is planned for them",
            )
        return index

    def _num_places_taken(self) -> int:
        """By placements without an alias; the engine's own stays, so it has a place of its own."""
        places = [one for one, index in self._live.items() if index >= self._num_named]
        return sum(one != self._own for one in places)

    def _may_retire(self, placement: str, ahead: Collection[int]) -> bool:
        index = self._live[placement]
        if index < self._num_named or index in ahead or placement == self._own:
            return False
        if not self._scheduler.retire_placement(index):
            return False
        # Requests that had it and did not start wait behind.
        self.any_waits = True
        return True

    def _planned(self, index: int, placement: str, first_group: int) -> KVCacheConfig:
        specs = self._executor.collective_rpc("get_placement_specs", args=(placement,))
        check_same_layers(specs)
        placed = (placement, specs[0])
        try:
            return with_placement(self._vllm_config, self._config, index, placed, first_group)
        except ValueError as error:
            raise VLLMValidationError(
                f"placement {placement}: {error}; name it with --placement-alias, then memory is "
                "planned for it",
                "placement",
            ) from None

    # ---- the engine's own ----------------------------------------------------------------------

    def own(self) -> str | None:
        """What requests have that do not choose; None where they cannot choose."""
        return self._own or None

    def change(self, placement: Placement) -> PlacementChange:
        """Everything that can be refused is checked first: the names, that the new state fits.

        Raises `VLLMValidationError` for a placement the model does not have, or whose state does
        not fit into the memory, and `RuntimeError` if it fails on the way; the placement is then as
        before.
        """
        self._replaced = None
        connector = self._scheduler.get_kv_connector()
        if connector is not None and not connector.can_leave_memory:
            raise VLLMValidationError(
                f"{type(connector).__name__} knows the layers' memory by its addresses, so the "
                "placement cannot change; start the engine with --placement",
                "placement",
            )
        needs = self._needs(placement)
        if self._scheduler.has_unfinished_requests():
            return PlacementChange(True, [])
        try:
            config, *_ = self._memory.plan(*needs)
        except ValueError as error:
            raise VLLMValidationError(f"placement: {error}", "placement") from None
        self._drain()
        if not self._scheduler.reset_prefix_cache():
            raise RuntimeError("the placement cannot change: state blocks are still in use")
        begin = time.monotonic()
        before, *_ = self._executor.collective_rpc("get_own_placement")
        try:
            found = self._place(placement, config)
        except Exception as error:
            # Its frames hold what was allocated.
            failure = error.with_traceback(None)
        else:
            self._replaced = before
            logger.info("placement changed in %.2f s", time.monotonic() - begin)
            return PlacementChange(False, found, [self._memory.size()])
        self._restore(before)
        raise RuntimeError(
            f"the placement is {before} as before, for the change failed: "
            f"{type(failure).__name__}: {failure}"
        ) from failure

    def take_back(self) -> None:
        """Another replica has failed to do the change that this one has just done, if it has."""
        if self._replaced is not None:
            self._restore(self._replaced)
            self._replaced = None

    def _place(self, placement: Placement, config: KVCacheConfig) -> list[dict[int, str]]:
        """Change the workers, in two parts, for a rank that fails in the first one must not leave
        others waiting for it in the second; then the scheduler."""
        found = self._executor.collective_rpc("apply_placement", args=(placement, config))
        self._executor.collective_rpc("warm_up_placement")
        # A connector of the scheduler's reads it there.
        self._vllm_config.model_config.placement = as_text(placement)
        self._late_captures.recount()
        self._scheduler.use_memory(config)
        tell_weights_read(self._vllm_config, self._scheduler, self._executor)
        self._use(config)
        self._memory.adopt(config)
        return found

    def _restore(self, placement: str) -> None:
        """Place what was there before a change that failed, on workers of which some may have
        changed."""
        config, *_ = self._memory.plan(*self._needs(placement))
        self._place(placement, config)

    def _needs(
        self, placement: Placement
    ) -> tuple[list[dict[str, KVCacheSpec]], list[list[PlacementSpecs]], list[BesideArena]]:
        """What `CoreMemory.plan` asks for, of every worker."""
        specs = self._executor.collective_rpc("get_placement_specs", args=(placement,))
        placed = self._executor.get_placed_specs(placement)
        return specs, placed, self._executor.get_bytes_beside(placement)

    def overlap(self, placement: Placement) -> PlacementChange:
        """From here on requests that do not choose have this placement; those that have started
        keep theirs. The pages stay as they are.

        Raises `VLLMValidationError` where requests cannot choose, and for a placement that they
        cannot have or that finds no place.
        """
        if not self._config.placements:
            reason = why_one_at_a_time(self._vllm_config) or "the model is no supernet"
            raise VLLMValidationError(
                f"mode 'overlap' needs two placements at once: {reason}; use 'wait'", "mode"
            )
        spelled = self._bring(placement)
        index = self._live.get(spelled)
        if index is None:
            index = self._make_place(spelled, self._of_waiting())
        if index is None:
            raise VLLMValidationError(
                f"placement {spelled}: requests use all {self._most_unnamed} places for placements "
                "without an alias; raise --max-request-placements, or use mode 'wait'",
                "placement",
            )
        self._own = spelled
        found = self._executor.collective_rpc("use_as_own", args=(index,))
        self._memory.adopt(self._config, index)
        return PlacementChange(False, found, [self._memory.size()])


def tell_weights_read(
    vllm_config: VllmConfig, scheduler: SchedulerInterface, executor: Executor
) -> None:
    """Tell the scheduler what drafting costs, by the weights that steps read from here on."""
    drafter = vllm_config.drafter
    if drafter is not None and (drafter.reads_target or drafter.is_draft_model):
        # Ranks have equal parts.
        scheduler.use_weights_read(*executor.collective_rpc("weights_read")[0])
