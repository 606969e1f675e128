# SPDX-License-Identifier: Apache-2.0
"""Config of a DFlash or DSpark drafter in the format of the speculators library."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class DFlashConfig(PretrainedConfig):
    """`layers`: the config of the draft's own decoder layers, which is the text config.

    `aux_layer_ids`: the residual streams that are fused, ascending (id k: after k layers of the
    target), each `target_hidden_size` wide. A block has `block_size` tokens: the newest one, its
    anchor, and `mask_token_id` in all other places. With `sample_from_anchor` every row predicts
    the token after it, else every row but the anchor's the token in its own place. Rows of a block
    see each other; in layers with a window only those before them, unless
    `sliding_window_non_causal`. `markov_rank`: of what the token before adds to a row's logits;
    0: nothing.
    """

    model_type = "dflash"

    def __init__(
        self,
        layers: PretrainedConfig | None = None,
        *,
        draft_vocab_size: int = 32000,
        target_hidden_size: int = 0,
        aux_layer_ids: tuple[int, ...] = (),
        mask_token_id: int = 0,
        block_size: int = 8,
        sample_from_anchor: bool = False,
        sliding_window_non_causal: bool = False,
        markov_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        self.layers = layers  # read by the base class
        super().__init__(**kwargs)
        self.draft_vocab_size = draft_vocab_size
        self.target_hidden_size = target_hidden_size
        self.aux_layer_ids = tuple(aux_layer_ids)
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

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PretrainedConfig:
        return self if self.layers is None else self.layers
