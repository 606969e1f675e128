# SPDX-License-Identifier: Apache-2.0
"""Keeps tokens that are parts of characters from spelling what is no UTF-8.

Grammars run on bytes, and their character classes take any lead byte with any continuation bytes.
Overlong forms, surrogates and code points past U+10FFFF are excluded by the second byte (RFC 3629,
section 4), or by the first alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from vllm.v1.structured_output.mask_words import pack_tokens

#: lead byte -> first and last second byte that are wrong after it
_WRONG_SECOND = {
    0xE0: (0x80, 0x9F),
    0xED: (0xA0, 0xBF),
    0xF0: (0x80, 0x8F),
    0xF4: (0x90, 0xBF),
}
_WRONG = re.compile(
    rb"[\xc0\xc1\xf5-\xff]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]"
)


def never_utf8(text: bytes) -> bool:
    """Whether no valid text contains these bytes."""
    return _WRONG.search(text) is not None


class Utf8Guard:
    """Which tokens may not follow a token that ends in a lead byte; `texts`: bytes per token."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._lead_of = {
            token: text[-1] for token, text in enumerate(texts) if text[-1:] and text[-1] > 0xDF
        }
        self._may_follow = {
            lead: ~pack_tokens(
                [token for token, text in enumerate(texts) if text and low <= text[0] <= high],
                len(texts),
            )
            for lead, (low, high) in _WRONG_SECOND.items()
        }

    def narrow(self, mask: np.ndarray, last_token: int) -> None:
        """Clear bits of `mask [words]` int32 in place; `last_token` is the one before."""
        allowed = self._may_follow.get(self._lead_of.get(last_token, 0))
        if allowed is not None:
            mask &= allowed
