# SPDX-License-Identifier: Apache-2.0
"""Counters that launches of one stream share: zero between launches, and no other stream's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def per_stream(
    make: Callable[Concatenate[torch.device, P], Tensor],
) -> Callable[Concatenate[torch.device, P], Tensor]:
    """`make(device, ...)` once for each stream of a device, and other arguments; they are hashable.

    Launches of one stream follow each other, so each finds what the last one left. Those of two
    streams (two engines on one GPU) may overlap. A graph keeps the counter of the stream that
    captures it: replay it there, or where nothing else runs meanwhile.

    Inside a capture a stream that has no counter yet gets one for that launch alone, which every
    replay zeroes: what a capture allocates is not zero before its first replay, so it is not kept.
    That costs a launch more; run the kernel once on the capturing stream before.
    """
    made: dict[Hashable, Tensor] = {}

    @wraps(make)
    def counter(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        key = (device, stream_of(device), args, tuple(kwargs.items()))
        found = made.get(key)
        if found is None:
            found = make(device, *args, **kwargs)
            if not is_capturing(device):
                made[key] = found
        return found

    return counter


def stream_of(device: torch.device) -> int:
    """What tells the current stream of a device from its others; 0 where there is one alone."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Whether launches on a device's current stream are recorded and not run."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
