# SPDX-License-Identifier: Apache-2.0
"""Layouts as text."""

from collections.abc import Iterator

from vllm.entrypoints.cli.text_table import amount, decision_lines, table
from vllm.v1.core.decode_cost import DeviceSpeed
from vllm.v1.core.explain_layout import LayoutComparison, LayoutReport, OwnLayout, StageReport
from vllm.v1.core.layout_cost import Layout, StepCost
from vllm.v1.core.link_speed import LinkSpeed
from vllm.v1.core.prefill_cost import PrefillCost

_PEERS = "sums of up to 512 kB through peer memory, as measured between two H200"
_STAGE_COLUMNS = (
    "one rank of", "layers", "weights", "state memory", "uncommitted", "reserved",
    "requests", "all-reduces", "experts", "all-gathers", "streams", "exchanges", "ms", "exchanging",
)  # fmt: skip
_CANDIDATE_COLUMNS = (
    "layout", "tp", "pp", "dp", "fits", "memory per rank", "of it weights", "sent per step",
    "tok/s of 1", "full batch", "tok/s of it", "prefill tok/s",
)  # fmt: skip


def layout_section(own: OwnLayout | None) -> list[str]:
    """The configured layout; nothing for a single device."""
    return [] if own is None else [*_own(own.report), rates_line(own.device, own.link)]


def render_comparison(report: LayoutComparison) -> str:
    """All layouts, which are best, and the configuration's decisions."""
    sections = [
        [f"{report.architecture} ({report.model}), {report.dtype}"],
        [*_candidates(report), rates_line(report.device, report.link)],
        ["Decisions", *(f"  {line}" for line in decision_lines(report.decisions))],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def rates_line(device: DeviceSpeed, link: LinkSpeed | None) -> str:
    """What is predicted, with which rates, and where they come from."""
    text = (
        "Predicted decode steps and prefills, without drafts, sampling and the host's work, for "
        f"the {device.name} ({device.bytes_per_s / 1e12:.4g} TB/s, "
        f"{device.flops_per_s / 1e12:,.4g} TFLOP/s, {device.launch_s * 1e6:g} us per kernel)"
    )
    if link is None:
        return text + "."
    return text + (
        f" and {link.name} ({link.bytes_per_s / 1e9:,.4g} GB/s each way, {link.base_s * 1e6:g} us "
        f"per exchange and {link.hop_s * 1e6:g} us per hop: {link.source}"
        + (f"; {_PEERS}" if link.peer_sums else "")
        + ")."
    )


# ---- the configured layout -----------------------------------------------------------------------


def _own(report: LayoutReport) -> Iterator[str]:
    layout = report.layout
    yield f"Layout {layout.name}: {_in_words(layout)}, {layout.devices} devices"
    stages = enumerate(report.stages)
    yield from table(_STAGE_COLUMNS, [_stage_row(i, layout, stage) for i, stage in stages])
    yield f"The state memory is {report.memory_source}; bytes sent and ms are those of a step."
    if report.too_large:
        yield f"It does not fit: {report.too_large}"
    for cost in (report.one, report.asked, report.full):
        if cost is not None:
            yield _step(cost, layout, is_full=cost is report.full)
    if report.prefill is not None:
        yield _prefill(report.prefill, layout)


def _in_words(layout: Layout) -> str:
    parts = [
        f"{layout.dp} replicas of" if layout.dp > 1 else "",
        f"{layout.pp} stages of" if layout.pp > 1 else "",
        f"{layout.tp} rank{'s' if layout.tp > 1 else ''}",
        "with whole experts" if layout.ep else "",
    ]
    return " ".join(part for part in parts if part)


def _stage_row(index: int, layout: Layout, stage: StageReport) -> list[str]:
    sent = stage.traffic
    return [
        f"stage {index + 1}" if layout.pp > 1 else "a replica",
        str(stage.layers),
        amount(stage.weight_bytes),
        amount(stage.arena_bytes),
        amount(stage.ring_bytes),
        amount(stage.reserved_bytes),
        f"{stage.step_tokens:,}",
        amount(sent.all_reduces),
        amount(sent.experts),
        amount(sent.all_gathers),
        amount(sent.streams),
        str(sent.exchanges),
        f"{stage.seconds * 1e3:.3f}",
        f"{stage.exchange_seconds * 1e3:.3f}",
    ]


def _step(cost: StepCost, layout: Layout, is_full: bool) -> str:
    whom = f"{cost.batch:,} request{'s' if cost.batch > 1 else ''} of {cost.context:,} tokens"
    whom += " per replica" if layout.dp > 1 else ""
    whom += " (as many as run at once)" if is_full else ""
    share = cost.exchange_seconds / cost.seconds
    return (
        f"{whom}: a token each every {cost.seconds * 1e3:.3f} ms ({share:.0%} for exchanges), "
        f"{cost.tokens_per_s:,.0f} tokens/s in all"
    )


def _prefill(cost: PrefillCost, layout: Layout) -> str:
    share = cost.exchange_seconds / cost.seconds
    return (
        f"Prefills in steps of {cost.step_tokens:,} tokens, of prompts of {cost.length:,}"
        + (", per replica" if layout.dp > 1 else "")
        + f": {cost.seconds * 1e3:.3f} ms a step ({share:.0%} for exchanges), "
        f"{cost.tokens_per_s:,.0f} tokens/s in all"
    )


# ---- all layouts of so many devices --------------------------------------------------------------


def _candidates(report: LayoutComparison) -> Iterator[str]:
    yield (
        f"Layouts of {report.devices} devices, requests of {report.context:,} tokens; sent: by a "
        f"rank in a step, {report.batch:,} requests per replica"
    )
    shown = [one for one in report.candidates if not one.refused]
    yield from table(_CANDIDATE_COLUMNS, [_candidate_row(one) for one in shown])
    for one in report.candidates:
        if not one.is_possible:
            why = "not possible" if one.refused else "does not fit"
            yield f"  {one.layout.name}: {why}: {one.refused or one.too_large}"
    if shown:
        yield f"The state memory is {shown[0].memory_source}."
    bounded = {
        one.full.batch for one in report.candidates if one.full and one.full.batch < one.sequences
    }
    for most in bounded:
        yield f"--max-num-seqs {most} bounds full batches of a replica; more requests would fit."
    if report.lowest_latency is None or report.highest_throughput is None:
        yield "No layout is possible."
        return
    fast, many = (report.candidates[i] for i in (report.lowest_latency, report.highest_throughput))
    assert fast.one is not None and many.full is not None
    yield (
        f"Best for latency: {_flags(fast.layout)}, a token every {fast.one.seconds * 1e3:.3f} ms "
        "with 1 request"
    )
    yield (
        f"Best for throughput: {_flags(many.layout)}, {many.full.tokens_per_s:,.0f} tokens/s with "
        f"{many.full.batch * many.layout.dp:,} requests at once"
    )


def _candidate_row(one: LayoutReport) -> list[str]:
    layout = one.layout
    fullest = max(one.stages, key=lambda stage: stage.weight_bytes)
    row = [layout.name, str(layout.tp), str(layout.pp), str(layout.dp)]
    row += ["no" if one.too_large else "yes", amount(fullest.rank_bytes)]
    row += [amount(fullest.weight_bytes), amount(max(s.traffic.total for s in one.stages))]
    if one.one is None or one.full is None or one.prefill is None:
        return [*row, "", "", "", ""]
    speeds = [f"{1 / one.one.seconds:,.0f}", f"{one.full.batch * layout.dp:,}"]
    speeds += [f"{one.full.tokens_per_s:,.0f}", f"{one.prefill.tokens_per_s:,.0f}"]
    return [*row, *speeds]


def _flags(layout: Layout) -> str:
    sizes = (("-tp", layout.tp), ("-pp", layout.pp), ("-dp", layout.dp))
    flags = [f"{flag} {size}" for flag, size in sizes if size > 1] + ["-ep"] * layout.ep
    return " ".join(flags) or "-tp 1"
