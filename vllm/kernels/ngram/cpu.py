# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup in numpy, for a CPU."""

import numpy as np

from vllm.kernels.ngram.problem import LookupProblem
from vllm.kernels.step.problem import ACCEPT_FIRST, ACCEPT_ROW


def _first_place(tokens: np.ndarray, least: int, most: int) -> int:
    """Where the tokens after the match begin; 0 without a match."""
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last]) + 1
    found = places[:0]
    for n in range(1, most + 1):
        if n > 1:
            places = places[places >= n]
            places = places[tokens[places - n] == tokens[last + 1 - n]]
        if not len(places):
            break
        if n >= least:
            found = places
    return int(found[0]) if len(found) else 0


def look_up(problem: LookupProblem) -> None:
    """See `LookupProblem`; every tensor is in host memory."""
    history, lengths = problem.history.numpy(), problem.lengths.numpy()
    tokens, drafts = problem.tokens.numpy(), problem.drafts.numpy()
    sampled, counts = problem.sampled.numpy(), problem.counts.numpy()
    for request, count in zip(problem.requests.numpy(), counts, strict=True):
        row, first = request[ACCEPT_ROW], request[ACCEPT_FIRST]
        begin = lengths[row]
        end = min(begin + count, history.shape[1])
        history[row, begin:end] = sampled[first : first + end - begin]
        lengths[row] = end
        drafts[row] = 0
        if problem.num_drafts and end > 1:
            place = _first_place(history[row, :end], problem.least, problem.most)
            if place:
                found = history[row, place : min(place + problem.num_drafts, end)]
                tokens[row, 1 : 1 + len(found)] = found
                drafts[row] = len(found)
