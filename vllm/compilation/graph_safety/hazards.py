# SPDX-License-Identifier: Apache-2.0
"""What breaks a captured step, and what to write instead: the checklist as data."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Hazard:
    """An item of the checklist. `static`: whether the static pass looks for it; `gpu_test`: tests
    of this tree that need a GPU and look at it in the engine's steps, "" where there are none;
    `replayed`: whether replays simulated on a CPU show it."""

    number: int
    title: str
    replacement: str
    gpu_test: str = ""
    static: bool = True
    replayed: bool = True


_STEADY = "tests/gpu/test_steady_steps.py"
_REPLAY = "tests/gpu/test_graph_replay.py"
_PIECES = "tests/gpu/test_piecewise_replay.py"
_DEVICES = "tests/gpu/test_graph_devices.py"
_EXPERTS = "tests/kernels/test_moe.py"

HAZARDS: dict[int, Hazard] = {
    hazard.number: hazard
    for hazard in (
        Hazard(
            1,
            "the host reads a device value",
            "drop it, or keep the value on the device; print outside the step",
            _STEADY,
        ),
        Hazard(
            2,
            "a shape depends on data",
            "fixed shapes and a mask: torch.where with three arguments, masked_fill, or "
            "scatter_add_ of ones into a preallocated tensor of counts",
            _EXPERTS,
        ),
        Hazard(
            3,
            "the host launches work per element of a tensor",
            "one launch with a worst-case grid that reads the elements on the device",
            _EXPERTS,
        ),
        Hazard(
            4,
            "Python writes a number into a tensor's element",
            "compute it on the device, or fill_ a fixed part with a constant",
            _REPLAY,
        ),
        Hazard(
            5,
            "the host branches on a device value",
            "do it unconditionally and select with torch.where",
            _STEADY,
        ),
        Hazard(
            6,
            "an eager part between graphs allocates",
            "write into the tensors that the break is given; allocate before it",
            _PIECES,
        ),
        Hazard(
            7,
            "an input is made anew, or copied from pageable memory",
            "a pinned host buffer and copy_(..., non_blocking=True) into a fixed device tensor, "
            "before the replay",
            "tests/gpu/test_staged_uploads.py",
        ),
        Hazard(
            8,
            "the host leaves early for a device value",
            "run always, with fixed shapes; skip rows on the device, by slot -1",
            _REPLAY,
        ),
        Hazard(
            9,
            "a cache grows by being replaced",
            "a paged cache of fixed size, a block table, and kernels that loop to a device length",
            _REPLAY,
        ),
        Hazard(
            10,
            "a gather is sized by a device value",
            "gather the most there may be, fill up with -1, and mask",
            _STEADY,
        ),
        Hazard(
            11,
            "a loop ends by a test of convergence",
            "a fixed number of iterations",
            _STEADY,
        ),
        Hazard(
            12,
            "the host takes the sampled token",
            "sample on the device into the next step's ids; copy them out beside the step",
            _STEADY,
        ),
        Hazard(
            13,
            "capture relies on the current device or stream",
            "torch.cuda.Stream(device=...) for each device, torch.cuda.graph(..., stream=...), and "
            "replay on the same stream",
            _DEVICES,
        ),
        Hazard(
            14,
            "the host waits for the device",
            "events: record on the producer's stream, wait_event on the consumer's",
            _STEADY,
        ),
        Hazard(
            15,
            "a tensor that a graph reads is freed",
            "hold a reference on the module for as long as the graph",
            static=False,
        ),
        Hazard(
            16,
            "a buffer is too narrow for what is written to it",
            "check shape and strides where the buffer is made",
            static=False,
        ),
        Hazard(
            17,
            "a preallocated tensor is replaced",
            "copy_ into it: a graph reads the address of its capture",
            _PIECES,
        ),
        Hazard(
            18,
            "a kernel is given a broadcast view, with stride 0",
            "make it contiguous once, where it is made",
        ),
        Hazard(
            19,
            "a weight is converted in every step",
            "convert it when it is loaded",
        ),
        Hazard(
            20,
            "routing by token id reads ids of the capture",
            "gather from a table with the fixed tensor of input ids",
            static=False,
        ),
        Hazard(
            21,
            "padded rows touch a cache",
            "slot and state index -1, which kernels skip",
            _REPLAY,
            static=False,
        ),
        Hazard(
            22,
            "metadata lies in new tensors in every step",
            "fixed tensors, filled from pinned memory once per kind of layer",
            "tests/gpu/test_staged_uploads.py",
            static=False,
        ),
        Hazard(
            23,
            "a library plans inside the step",
            "plan before the replay, from lengths that the host knows",
            "tests/gpu/test_flashinfer.py",
        ),
        Hazard(
            24,
            "overlapping launches race",
            "a kernel that starts early waits (gdc_wait) before it reads what the last ones wrote, "
            "writes or ends; streams wait for each other: wait_stream, wait_event",
            "tests/gpu/test_dependent_launch.py",
            replayed=False,
        ),
        Hazard(
            25,
            "something compiles or tunes in a step",
            "constants that follow from the model alone; warm up every size before capture",
            "tests/gpu/test_compiled_ahead.py",
        ),
        Hazard(
            26,
            "a tensor is handed to the next step by reference",
            "copy_ into a fixed tensor, inside the graph",
            "tests/gpu/test_drafters.py",
        ),
        Hazard(
            27,
            "mutable state of a module is imported by value",
            "import the module, or a function that answers, and ask in the step",
        ),
        Hazard(
            28,
            "state holds infinities or NaN",
            "stay in the dtype's range: subtract the maximum before exp, clamp, sum in float32",
            static=False,
        ),
    )
}

#: items that replays show on one side only, with or without a GPU, and why
OF_ONE_SIDE = {
    24: "launches do not overlap on a CPU; on a GPU two runs of the same replays are compared",
}
#: items that a right result may hide on a GPU, too, where the notes of the recorder tell them; why
BY_CALLS = {
    6: "the allocator often hands out the address that the graph reads",
    13: "on one GPU the current device is always the right one",
    16: "torch makes room, and the capture keeps it",
    18: "some kernels read such views rightly",
    19: "the result is right, and late",
    20: "a replay copies the ids again, an eager step reads what it left",
    22: "the tables of the capture may still hold the same",
    27: "which value was meant the result does not say",
}


def hazard_of_branch(node: ast.If) -> int:
    """The item of a branch on a device value: what its body does in the end says which."""
    last = node.body[-1]
    if isinstance(last, ast.Return | ast.Continue):
        return 8
    return 11 if isinstance(last, ast.Break) else 5


def coverage(hazard: Hazard) -> str:
    """Which checks look for a hazard, as the documentation's table says it."""
    checks = ["static pass"] if hazard.static else []
    checks += ["replays"] if hazard.replayed else []
    checks += [f"`{hazard.gpu_test}`"] if hazard.gpu_test else []
    return ", ".join(checks) or "not covered yet"


def table() -> str:
    """The checklist as Markdown."""
    rows = [
        f"| {h.number} | {h.title} | {h.replacement} | {coverage(h)} |" for h in HAZARDS.values()
    ]
    return "\n".join(["| # | hazard | instead | what looks for it |", "|---|---|---|---|", *rows])
