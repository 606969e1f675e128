# SPDX-License-Identifier: Apache-2.0
"""What one request changes about its logits, as a row of int64 numbers for a kernel."""

from enum import IntEnum


class Field(IntEnum):
    """Columns of a descriptor; an address of 0 means that the request has none.

    `MARKS`: `[vocab]` int32, twice the output count, plus one for a token of the prompt. `BIAS`:
    `[vocab]` fp32. The penalties are the bits of fp32 numbers. `BANNED`: `[num_banned]` int64.
    `WORDS`: `[total]` int64, the tokens of all banned words; `STARTS`: `[num_words + 1]` int64,
    where each begins there. `RECENT`: `[num_recent]` int64, the last output tokens, -1 before the
    first. Banned tokens are barred up to `MIN_TOKENS` output tokens, which begin at position
    `NUM_PROMPT`.

    A row that follows drafts counts the first `NUM_BEFORE` of `DRAFTS` (`[drafts]` int64) as
    output. `REQUEST`: which request of those that sample it belongs to.
    """

    ROW = 0
    MARKS = 1
    BIAS = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5
    BANNED = 6
    NUM_BANNED = 7
    WORDS = 8
    STARTS = 9
    NUM_WORDS = 10
    RECENT = 11
    NUM_RECENT = 12
    NUM_PROMPT = 13
    MIN_TOKENS = 14
    DRAFTS = 15
    NUM_BEFORE = 16
    REQUEST = 17
