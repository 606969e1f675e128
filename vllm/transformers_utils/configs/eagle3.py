# SPDX-License-Identifier: Apache-2.0
"""Configs of drafters in the format of the speculators library: what all say, and EAGLE-3's."""

from typing import Any

from transformers import PretrainedConfig


class DraftConfig(PretrainedConfig):
    """`layers`: the config of the draft's own decoder layers, which is the text config.

    `aux_layer_ids`: the residual streams that are fused, ascending (id k: after k layers of the
    target), each `target_hidden_size` wide.
    """

    def __init__(
        self,
        layers: PretrainedConfig | None = None,
        *,
        draft_vocab_size: int = 32000,
        target_hidden_size: int = 0,
        aux_layer_ids: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        self.layers = layers  # read by the base class
        super().__init__(**kwargs)
        self.draft_vocab_size = draft_vocab_size
        self.target_hidden_size = target_hidden_size
        self.aux_layer_ids = tuple(aux_layer_ids)

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PretrainedConfig:
        return self if self.layers is None else self.layers


class Eagle3Config(DraftConfig):
    """`norm_before_fc`: one norm over all fused streams side by side; `fc_norm`: one for each.
    `norm_before_residual`: the first layer's residual is the normed hidden state; `norm_output`:
    the next draft starts from the normed output.
    """

    model_type = "eagle3"

    def __init__(
        self,
        layers: PretrainedConfig | None = None,
        *,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(layers, **kwargs)
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.architectures = ["Eagle3DraftModel"]
