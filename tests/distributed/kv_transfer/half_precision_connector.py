# SPDX-License-Identifier: Apache-2.0
"""An out-of-tree connector as clients write them: only the encoding differs."""

from __future__ import annotations

import os

from safetensors.torch import save_file
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as example,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import CopyEvent


class HalfPrecisionConnector(example.ExampleHiddenStatesConnector):
    """Stores half-precision rows."""

    @staticmethod
    def _write_tensors(
        tensors: dict[str, Tensor], event: CopyEvent, filename: str, lock_fd: int | None
    ) -> None:
        try:
            event.synchronize()
            save_file({**tensors, "hidden_states": tensors["hidden_states"].half()}, filename)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
