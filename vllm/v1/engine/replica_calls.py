# SPDX-License-Identifier: Apache-2.0
"""One answer of several replicas to a call that all of them got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.placements import PlacementChange
from vllm.v1.engine.sleep import TAGS

#: calls after which no replica has the prefixes that it had
_FORGETTING = frozenset({"reset_prefix_cache", "sleep", "change_placement"})
#: call -> what takes it back, with its arguments, where some replicas could and others could not
_UNDO: dict[str, tuple[Any, ...]] = {"sleep": ("wake_up", TAGS)}


def combined(method: str, ranks: Sequence[int], answers: Sequence[Any]) -> Any:
    """Of results or exceptions in rank order: all results of a worker call, whether all could, or
    what all say alike. Raises the replicas' error if there is any."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise _joint_error(method, ranks, answers, errors)
    return _COMBINE.get(method, _first)(answers)


def undo(method: str, answers: Sequence[Any]) -> tuple[list[int], tuple[Any, ...]]:
    """Which replicas, by their places in `answers`, have to be told what so that all are in one
    state again; none if all could, or none."""
    call = _UNDO.get(method)
    succeeded = [i for i, one in enumerate(answers) if not isinstance(one, BaseException)]
    if call is None or len(succeeded) == len(answers):
        return [], ()
    return succeeded, call


def forgets_prefixes(method: str, args: tuple[Any, ...]) -> bool:
    """Whether caches are empty after the call."""
    return method in _FORGETTING or (method == "collective_rpc" and args[0] == "reload_weights")


def _joint_error(
    method: str, ranks: Sequence[int], answers: Sequence[Any], errors: list[BaseException]
) -> BaseException:
    dead = next((error for error in errors if isinstance(error, EngineDeadError)), None)
    if dead is not None:
        return dead
    if len(errors) == len(answers):
        return errors[0]
    failed = [
        f"replica {rank}: {answer}"
        for rank, answer in zip(ranks, answers, strict=True)
        if isinstance(answer, BaseException)
    ]
    others = "" if method in _UNDO else "; the others have done it"
    return EngineGenerateError(f"{method} failed on {', '.join(failed)}{others}")


def _first(answers: Sequence[Any]) -> Any:
    return answers[0]


def _joined(answers: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(answers))


def _placement_change(answers: Sequence[PlacementChange]) -> PlacementChange:
    return PlacementChange(
        any(one.is_busy for one in answers),
        _joined([one.placements for one in answers]),
        sum(one.num_gpu_blocks or 0 for one in answers),
        sum(one.capacity_tokens or 0 for one in answers),
    )


_COMBINE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "collective_rpc": _joined,
    "reset_prefix_cache": all,
    "change_placement": _placement_change,
}
