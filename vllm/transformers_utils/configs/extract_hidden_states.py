# SPDX-License-Identifier: Apache-2.0
"""Config of the pseudo drafter that stores hidden states of the target model."""

from typing import Any

from transformers import PretrainedConfig

_OWN = frozenset({"model_type", "architectures", "transformers_version"})


class ExtractHiddenStatesConfig(PretrainedConfig):
    """The target's config, every attribute kept, plus the given ones.

    `eagle_aux_hidden_state_layer_ids` lists the captured layers: id `k` is the residual stream
    after `k` decoder layers. Sub-configs (`text_config`) stay config objects.
    """

    model_type = "extract_hidden_states"

    def __init__(
        self, model: PretrainedConfig | dict[str, Any] | None = None, **given: Any
    ) -> None:
        super().__init__()
        for name, value in {**_attributes(model), **given}.items():
            if name not in _OWN:
                setattr(self, name, value)
        self.architectures = ["ExtractHiddenStatesModel"]


def _attributes(model: PretrainedConfig | dict[str, Any] | None) -> dict[str, Any]:
    """What can be read from the target, under the family's names and the common ones."""
    if not isinstance(model, PretrainedConfig):
        return dict(model or {})
    values = dict(vars(model))
    for common, own in model.attribute_map.items():
        if own in values:
            values[common] = values[own]
    return values
