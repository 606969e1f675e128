# SPDX-License-Identifier: Apache-2.0
"""What layers exchange with the other ranks that share them, told by the layers: for predictions.

A collective among n ranks goes around a ring: a sum crosses it twice, in n pieces, and a gathered
part, or one of a sum, once (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Collective:
    """One exchange per step. `token_bytes`: per token, of the tensor that is summed or of the part
    that each rank gives or gets; `what`: whose tensor it is; `among`: the ranks of one replica, or
    those of the same place in all that share experts."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    what: Literal["embedding", "layers", "norms", "experts", "logits"]
    token_bytes: float
    among: Literal["ranks", "replicas"] = "ranks"

    def hops(self, ranks: int) -> int:
        """Steps of the ring, one after the other."""
        return (2 if self.kind == "all-reduce" else 1) * (ranks - 1)

    def sent_bytes(self, ranks: int, tokens: int) -> float:
        """What one rank sends, and as much is what it receives."""
        pieces = ranks if self.kind == "all-reduce" else 1
        return self.token_bytes * tokens * self.hops(ranks) / pieces


class Communicates(ABC):
    """A module that exchanges tensors with other tensor-parallel ranks in a forward pass."""

    @abstractmethod
    def collectives(self, element_bytes: int) -> list[Collective]:
        """Those of this module without its children, none where it is not shared; an element of
        the model's activations takes `element_bytes`."""
