# SPDX-License-Identifier: Apache-2.0
"""Config of a DFlash or DSpark drafter in the format of the speculators library."""

from typing import Any

from transformers import PretrainedConfig

from vllm.transformers_utils.configs.eagle3 import DraftConfig


class DFlashConfig(DraftConfig):
    """A block has `block_size` tokens: the newest one, its anchor, and `mask_token_id` in all other
    places. With `sample_from_anchor` every row predicts the token after it, else every row but the
    anchor's the token in its own place. Rows of a block see each other; in layers with a window
    only those before them, unless `sliding_window_non_causal`. `markov_rank`: of what the token
    before adds to a row's logits; 0: nothing.
    """

    model_type = "dflash"

    def __init__(
        self,
        layers: PretrainedConfig | None = None,
        *,
        mask_token_id: int = 0,
        block_size: int = 8,
        sample_from_anchor: bool = False,
        sliding_window_non_causal: bool = False,
        markov_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(layers, **kwargs)
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.sample_from_anchor = sample_from_anchor
        self.sliding_window_non_causal = sliding_window_non_causal
        self.markov_rank = markov_rank
        self.architectures = ["DFlashDraftModel"]

    @property
    def first_draft(self) -> int:
        """The block's first row that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_draft
