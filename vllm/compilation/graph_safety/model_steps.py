# SPDX-License-Identifier: Apache-2.0
"""The steps of a model beside its source: what `vllm graph-check MODEL` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from vllm.compilation.graph_safety.device.checks import DevicesReport, check_devices
from vllm.compilation.graph_safety.ranks import RanksReport, check_ranks
from vllm.compilation.graph_safety.report import Report, join_report
from vllm.compilation.graph_safety.simulator.models import (
    LENGTH,
    ROWS,
    TOKENS,
    StepsReport,
    check_steps,
)
from vllm.compilation.graph_safety.values import kind_of
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.batch_defaults import UsageContext
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_outline import models_on_meta, outline_model
from vllm.platforms import current_platform
from vllm.utils.options import flag_name
from vllm.v1.executor.station import WorkerDiedError

#: weights in float32 that a check still makes up
_MOST_BYTES = 2 * 2**30
#: rows of a smaller copy, whose state is still as large as the model's
_COPYS_ROWS = 4
_NOT_RUN = "steps were not run: "
#: one replica runs, on this host, with weights that are made up
_ONE_REPLICA: dict[str, Any] = {
    "load_format": "dummy",
    "data_parallel_size": 1,
    "nnodes": 1,
    "distributed_executor_backend": None,
}
#: longest wait of a rank for another
_TIMEOUT_S = 120
#: sizes that no state has, and the most of them
_WIDTHS = {"vocab_size": 4096, "intermediate_size": 512, "moe_intermediate_size": 256}
#: of a model whose heads do not follow from it
_HIDDEN = 512


def with_steps(
    source: Callable[[], Report],
    args: EngineArgs,
    steps: int,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """The report of a model's source, which `source` gives once the steps are over, with the
    findings of `steps` steps of it, as `check_model_steps` runs them. What cannot be run is in
    `left`, with the reason."""
    if not steps:
        report = source()
        return replace(report, left=(f"{_NOT_RUN}--steps 0", *report.left))
    try:
        found = check_model_steps(args, steps, progress)
    except (ValueError, torch.cuda.OutOfMemoryError) as error:
        report = source()
        return replace(report, left=(f"{_NOT_RUN}{error}", *report.left))
    report = source()
    modes = report.modes | found.modes
    joined = join_report(report.target, modes, functions=report.functions, cut=report.cut)
    left = () if current_platform.is_cuda() else report.left
    checks = (*report.checks, *found.checks)
    return replace(joined, checks=checks, left=left, captures=found.captures)


def check_model_steps(
    args: EngineArgs, steps: int, progress: Callable[[str], None] = lambda name: None
) -> Report:
    """What `steps` steps of a model show, with weights that are made up.

    On a CPU they run in float32, whose bits do not depend on the batch there, with simulated
    captures, and of a model that is too large for that a smaller copy runs; on GPUs with graphs,
    and the graphs of the sizes that were given are captured besides. One replica runs, on all its
    ranks; the summary names the flags that the steps do not have.

    Raises ValueError for what cannot be run, and torch's OutOfMemoryError on a GPU that is too
    small, RuntimeError for a rank that fails or dies, or where a step ends a GPU's process.
    """
    small: dict[str, Any] = {
        **_ONE_REPLICA,
        "distributed_timeout_seconds": args.distributed_timeout_seconds or _TIMEOUT_S,
        "max_model_len": LENGTH,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": TOKENS,
    }
    found: StepsReport | DevicesReport | RanksReport
    copied = ""
    if current_platform.is_cuda():
        own = replace(args, **_ONE_REPLICA)
        own_sizes = own.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # Small steps have none of those that were given; `own_sizes` has all of them.
        small |= dict.fromkeys(("cudagraph_capture_sizes", "max_cudagraph_capture_size"))
        config = replace(args, **small).create_engine_config()
        with gpu_errors_explained():
            if config.parallel_config.world_size == 1:
                found = check_devices(config, steps, progress, own_sizes)
            else:
                found = check_ranks(config, steps, progress, own_sizes)
    else:
        small["dtype"] = "float32"
        config = replace(args, **small).create_engine_config()
        config, copied = _that_fits(config, args, small)
        if config.parallel_config.world_size == 1:
            found = check_steps(config, steps, progress)
        else:
            found = check_ranks(config, steps, progress)
    summary = found.summary + copied + in_place_of(args, small)
    modes = found.modes
    return join_report(args.model, modes, checks=(summary,), left=(), captures=found.results)


@contextmanager
def gpu_errors_explained() -> Iterator[None]:
    """What ends a GPU's process inside the block is raised as a RuntimeError that says how to find
    its line."""
    try:
        yield
    except (torch.AcceleratorError, WorkerDiedError) as error:
        raise RuntimeError(
            f"{error}\nNothing runs on a GPU after such an error, which does not say whose it is: "
            "often a replay's that reads memory of its capture. The check without GPUs names the "
            "line: CUDA_VISIBLE_DEVICES= vllm graph-check ..."
        ) from error


def in_place_of(args: EngineArgs, small: dict[str, Any]) -> str:
    """Which flags that were given the steps do not have, in words; nothing where there are none."""
    defaults = {field.name: field.default for field in fields(EngineArgs)}
    given = {name: getattr(args, name) for name, value in small.items() if value is not None}
    names = [n for n, value in given.items() if value not in (defaults[n], small[n])]
    parts = [f"{flag_name(n)} {small[n]} in place of {given[n]}" for n in names]
    return f"; the steps had {', '.join(parts)}" if parts else ""


def _weight_bytes(config: VllmConfig) -> int:
    """All of them are made, on a CPU."""
    outline = outline_model(config)
    return outline.weight_bytes + outline.host_bytes


def _that_fits(
    config: VllmConfig, args: EngineArgs, small: dict[str, Any]
) -> tuple[VllmConfig, str]:
    """A configuration whose weights may be made up: the given one, or that of a smaller copy (then
    `small` has fewer rows, too) with what is smaller in it. VLLMValidationError where neither is
    small enough."""
    size = _weight_bytes(config)
    if size <= _MOST_BYTES:
        return config, ""
    copy = smaller_model(config) if isinstance(args.hf_overrides, dict) else None
    if copy is not None:
        # What the user overrides stays.
        small["max_num_seqs"] = _COPYS_ROWS
        overrides = copy.overrides | args.hf_overrides
        config = replace(args, **small | {"hf_overrides": overrides}).create_engine_config()
        size = _weight_bytes(config)
        if size <= _MOST_BYTES:
            return config, f"; of a smaller copy: {copy.summary}"
    raise VLLMValidationError(
        f"{size / 2**30:.1f} GiB of weights, the most is {_MOST_BYTES >> 30}; fewer layers of each "
        "kind do, and a smaller vocabulary: "
        '--hf-overrides \'{"num_hidden_layers": 4, "vocab_size": 4096}\''
    )


@dataclass(frozen=True)
class SmallerModel:
    """`overrides`: for `hf_overrides`; `summary`: what is smaller, in words."""

    overrides: dict[str, Any]
    summary: str


def smaller_model(config: VllmConfig) -> SmallerModel | None:
    """The first layers of a model up to the last new kind, a small vocabulary, narrow MLPs and
    residual stream; None for one that drafts, whose drafter is made for these sizes, and where
    nothing can be smaller."""
    assert config.model_config is not None
    if config.speculative_config is not None:
        return None
    overrides: dict[str, Any] = {}
    known = config.model_config.hf_text_config.to_dict()
    layers, needed = known.get("num_hidden_layers", 0), _layers_needed(config)
    if 0 < needed < layers:
        overrides["num_hidden_layers"] = needed
    widths = dict(_WIDTHS)
    if known.get("head_dim") and not any("expand" in name for name in known):
        widths["hidden_size"] = _HIDDEN
    for name, most in widths.items():
        if isinstance(known.get(name), int) and known[name] > most:
            overrides[name] = most
    if not overrides:
        return None
    parts = (f"{name} {value} of {known[name]}" for name, value in overrides.items())
    return SmallerModel(overrides, ", ".join(parts))


def _layers_needed(config: VllmConfig) -> int:
    """How many of the first decoder layers have all kinds; 0 without a list of layers."""
    _, (model, *_) = models_on_meta(config)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    kinds = [kind_of(layer) for layer in max(lists, key=len, default=[])]
    return max((kinds.index(kind) for kind in kinds), default=-1) + 1
