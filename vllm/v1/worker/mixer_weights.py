# SPDX-License-Identifier: Apache-2.0
"""Which of a supernet's mixers have their weights on the device: those of placements in use.

In use are the engine's own placement and those with an alias. A further one that a request brings
uses what they have, and what finds room beside the arena; that stays until memory is planned anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm import decisions
from vllm.model_executor.host_weights import (
    bytes_on_host,
    fetch_from_host,
    parameter_bytes,
    send_to_host,
)
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.model_executor.placements import Placement, placement_error


class MixerWeights:
    """Moves the weights of a model's mixers; a model that is no supernet has none that move."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model if isinstance(model, HasPlacements) else None
        self._device = device

    def fetch(self, placements: Sequence[Placement]) -> None:
        """Bring what these placements use to the device. If it has no room, its error; what has
        come by then is there."""
        for mixer in self._used(placements):
            fetch_from_host(mixer, self._device)

    def send(self, placements: Sequence[Placement]) -> None:
        """Send to the host what none of these placements uses."""
        if self._model is None or not placements:
            return
        for mixer in self._model.unused_mixers(*placements):
            send_to_host(mixer)
        self._record()

    def fetch_beside(self, placement: Placement, room_bytes: int | None) -> None:
        """As `check_room`, then `fetch`."""
        self.check_room(placement, room_bytes)
        self.fetch([placement])
        self._record()

    def check_room(self, placement: Placement, room_bytes: int | None) -> None:
        """`VLLMValidationError` if the placement uses weights on the host that take more than these
        bytes of the device; None: they take nothing there."""
        missing = bytes_on_host(self._used([placement]))
        if room_bytes is not None and missing > max(room_bytes, 0):
            raise placement_error(
                f"{missing} bytes of its mixers' weights are in host memory, and "
                f"--gpu-memory-utilization leaves {max(room_bytes, 0)} bytes beside the state "
                "memory; name it with --placement-alias, then memory is planned for it"
            )

    def num_bytes(self, placements: Sequence[Placement]) -> int:
        """What the mixers that these placements use take."""
        return parameter_bytes(self._used(placements))

    def _used(self, placements: Sequence[Placement]) -> list[nn.Module]:
        if self._model is None or not placements:
            return []
        unused = {id(mixer) for mixer in self._model.unused_mixers(*placements)}
        return [mixer for mixer in self._model.get_mixers() if id(mixer) not in unused]

    def _record(self) -> None:
        assert self._model is not None
        mixers = self._model.get_mixers()
        away, whole = bytes_on_host(mixers), parameter_bytes(mixers)
        what, size = "weights of mixers that no placement in use has", f"{away / 2**30:.3f} GiB"
        if self._device.type == "cpu":
            decisions.record(what, f"{size} stay", "a CPU computes in host memory")
            return
        rest = f"{(whole - away) / 2**30:.3f} GiB"
        decisions.record(what, f"{size} in host memory", f"those in use take {rest} of the device")
