# SPDX-License-Identifier: Apache-2.0
"""What a step's rows compute and how far they got, on the device: `prepare` and `accept`."""

from vllm.kernels.step.problem import (
    AcceptProblem,
    JournalCommits,
    PagedGroups,
    PagedSlots,
    PrepareProblem,
    Progress,
)

__all__ = [
    "AcceptProblem",
    "JournalCommits",
    "PagedGroups",
    "PagedSlots",
    "PrepareProblem",
    "Progress",
    "accept",
    "prepare",
]


def prepare(problem: PrepareProblem) -> None:
    """See `PrepareProblem`: one launch on CUDA, numpy on a CPU."""
    if problem.positions.is_cuda:
        from vllm.kernels.step.triton import prepare as launch

        launch(problem)
    else:
        from vllm.kernels.step.cpu import prepare as run

        run(problem)


def accept(problem: AcceptProblem) -> None:
    """See `AcceptProblem`: one launch on CUDA, numpy on a CPU."""
    if problem.sampled.is_cuda:
        from vllm.kernels.step.triton import accept as launch

        launch(problem)
    else:
        from vllm.kernels.step.cpu import accept as run

        run(problem)
