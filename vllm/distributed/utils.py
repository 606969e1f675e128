# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of sharding."""

from vllm.exceptions import VLLMValidationError


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; raises ValueError when there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def per_rank(what: str, count: int, num_ranks: int) -> int:
    """What a tensor-parallel rank has of `count`; raises VLLMValidationError naming `what` when
    they cannot be shared evenly."""
    if count % num_ranks:
        raise VLLMValidationError(
            f"{count} {what} cannot be divided among {num_ranks} tensor-parallel ranks; choose a "
            "--tensor-parallel-size that divides them",
            "tensor_parallel_size",
            num_ranks,
        )
    return count // num_ranks


def check_shared_evenly(num_users: int, users: str, num_shared: int, shared: str) -> None:
    """VLLMValidationError where heads of one kind, `shared`, cannot each serve as many of another,
    whatever the ranks."""
    if num_shared < 1 or num_users % num_shared:
        raise VLLMValidationError(
            f"{num_users} {users} for {num_shared} {shared} are not supported; their number must "
            "be a multiple",
            "model",
        )


def copied_parts(what: str, count: int, num_ranks: int) -> int:
    """Into how many parts `count` heads of a kind are cut that `num_ranks` tensor-parallel ranks
    may have copies of: neighbouring ranks have the same one where there are fewer heads than ranks.
    Rank r has part `r * parts // num_ranks`.

    Raises VLLMValidationError naming `what` when they can be neither divided nor copied evenly.
    """
    parts = min(count, num_ranks)
    if max(count, num_ranks) % parts:
        raise VLLMValidationError(
            f"{count} {what} can be neither divided among {num_ranks} tensor-parallel ranks nor "
            "copied to them evenly; choose another --tensor-parallel-size",
            "tensor_parallel_size",
            num_ranks,
        )
    return parts
