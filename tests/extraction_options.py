# SPDX-License-Identifier: Apache-2.0
"""What turns hidden-state extraction on, as tests of many folders ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def extraction(
    storage: str | Path, layers: Sequence[int] = (1, 4), **connector: Any
) -> dict[str, Any]:
    """Keywords of `EngineArgs` and `LLM`: every request's streams of `layers` go to files in
    `storage`. `connector`: further settings of it."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage), **connector},
        },
    }
