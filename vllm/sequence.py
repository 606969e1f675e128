# SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage hands to the next."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class IntermediateTensors:
    """Named activations, each `[tokens, hidden]`."""

    tensors: dict[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __len__(self) -> int:
        return len(self.tensors)
