# SPDX-License-Identifier: Apache-2.0
"""What a process does once on its device, done beside its imports.

torch loads a kernel's code when it first launches it, and cuBLAS what it needs of itself, for tens
of milliseconds each and outside of Python; a model's first step would wait for one after another.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

#: rows, columns: any will do
_SHAPE = (64, 64)


def use_on_a_thread(device: torch.device) -> threading.Thread:
    """Begin to use `device` with what every model uses."""
    thread = threading.Thread(target=_use, args=(device,), name="first-use", daemon=True)
    thread.start()
    return thread


@torch.inference_mode()
def _use(device: torch.device) -> None:
    torch.cuda.set_device(device)
    weight = torch.zeros(_SHAPE, dtype=torch.bfloat16, device=device)
    places = torch.arange(_SHAPE[0], device=device)
    nn.functional.linear(nn.functional.embedding(places, weight), weight)
    torch.cuda.synchronize(device)
