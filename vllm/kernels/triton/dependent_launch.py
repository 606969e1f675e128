# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Kernels that start while their predecessor still runs (programmatic dependent launch).

A decode step is a chain of some hundred kernels of microseconds, and starting one takes about as
long. On Hopper and later a kernel launched so begins early: it lets its successor begin
(`start_next`), reads weights and the step's inputs, which were written before the chain began, and
waits for the whole of its predecessor (`await_previous`) before it touches anything else.

Every program waits, whatever it goes on to do. So a kernel that has ended implies that all before
it have, and what this one overwrites after its wait has no reader left.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel begin once every program of this one got here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel with a `PDL` parameter, for `device`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
