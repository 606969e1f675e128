# SPDX-License-Identifier: Apache-2.0
"""The search for the longest prefix all groups can continue."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.prefix_cache import GroupHit, find_common_hit, reads_prefix_cache


class Continues:
    """A group that can continue exactly the prefixes of these lengths (and the empty one)."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = {0, *lengths}

    def find_longest_hit(self, prefix, max_tokens):
        length = max(n for n in self.lengths if n <= max_tokens)
        return GroupHit(length, [KVCacheBlock(length)] if length else [])


def test_every_group_must_continue():
    assert find_common_hit([Continues(16, 32, 48), Continues(32)], [], 100)[0] == 32
    assert find_common_hit([Continues(16, 32, 48), Continues()], [], 100)[0] == 0
    assert find_common_hit([Continues()], [], 100) == (0, [GroupHit(0, [])])
    assert find_common_hit([], [], 100) == (0, [])


def test_blocks_are_those_of_the_common_length():
    """The second group shortens the first, which falls between its own lengths."""
    groups = [Continues(16, 48), Continues(40, 37, 16), Continues(16, 37)]
    num_tokens, hits = find_common_hit(groups, [], 100)
    assert num_tokens == 16
    assert [[b.block_id for b in hit.blocks] for hit in hits] == [[16], [16], [16]]


def test_limit_is_kept():
    assert find_common_hit([Continues(16, 32)], [], 31)[0] == 16
    assert find_common_hit([Continues(16, 32)], [], 0)[0] == 0


@given(
    st.lists(st.sets(st.integers(1, 30), max_size=12), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_longest_common_length(lengths, max_tokens):
    groups = [Continues(*group) for group in lengths]
    common = [n for n in set.intersection(*lengths) if n <= max_tokens]
    num_tokens, hits = find_common_hit(groups, [], max_tokens)
    assert num_tokens == max(common, default=0)
    assert len(hits) == len(groups)


@pytest.mark.parametrize(
    "params, reads",
    [
        (None, True),
        (SamplingParams(), True),
        (SamplingParams(logprobs=3), True),
        (SamplingParams(prompt_logprobs=0), False),
        (SamplingParams(skip_reading_prefix_cache=True), False),
        (SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False), False),
    ],
)
def test_who_reads_the_cache(params, reads):
    assert reads_prefix_cache(SimpleNamespace(sampling_params=params)) is reads
