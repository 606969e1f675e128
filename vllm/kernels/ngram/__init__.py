# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: what followed a row's newest tokens when they came before."""

from vllm.kernels.ngram.problem import LookupProblem

__all__ = ["LookupProblem", "look_up"]


def look_up(problem: LookupProblem) -> None:
    """See `LookupProblem`: three launches on CUDA, numpy on a CPU."""
    if problem.history.is_cuda:
        from vllm.kernels.ngram.triton import look_up as launch

        launch(problem)
    else:
        from vllm.kernels.ngram.cpu import look_up as run

        run(problem)
