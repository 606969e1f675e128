# SPDX-License-Identifier: Apache-2.0
"""Scheduling one step ahead of the device."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.core.sched.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """Lets the next step be scheduled while one is on the device.

    The policy is `Scheduler`'s: a sampled token counts as a placeholder until its value arrives,
    so a request can be scheduled past it. What follows from running ahead: a stop token is seen
    one step late (that step's token is dropped), and tokens sampled before a preemption are
    dropped on arrival, to be sampled again.
    """

    steps_ahead: ClassVar[int] = 1
