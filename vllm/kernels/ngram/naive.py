# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup in plain Python: the reference."""

from vllm.kernels.ngram.problem import LookupProblem
from vllm.kernels.step.problem import ACCEPT_FIRST, ACCEPT_ROW


def continuation(tokens: list[int], least: int, most: int, limit: int) -> list[int]:
    """Up to `limit` of the `tokens` that follow the first place, before the end, of the longest
    suffix of `least` to `most` tokens that has one; see Saxena, "Prompt lookup decoding" (2023)."""
    for n in range(min(most, len(tokens) - 1), least - 1, -1):
        suffix = tokens[-n:]
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == suffix:
                return tokens[end : end + limit]
    return []


def look_up(problem: LookupProblem) -> None:
    """See `LookupProblem`."""
    size = problem.history.shape[1]
    for request, count in zip(problem.requests.tolist(), problem.counts.tolist(), strict=True):
        row, first = request[ACCEPT_ROW], request[ACCEPT_FIRST]
        length = int(problem.lengths[row])
        new = problem.sampled[first : first + count].tolist()[: size - length]
        tokens = [*problem.history[row, :length].tolist(), *new]
        problem.history[row, length : len(tokens)] = problem.history.new_tensor(new)
        problem.lengths[row] = len(tokens)
        found = continuation(tokens, problem.least, problem.most, problem.num_drafts)
        problem.tokens[row, 1 : 1 + len(found)] = problem.tokens.new_tensor(found)
        problem.drafts[row] = len(found)
