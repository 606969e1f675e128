# SPDX-License-Identifier: Apache-2.0
"""An `Explanation` as text."""

from collections.abc import Iterator, Sequence

from vllm.entrypoints.cli.explain_layout_text import layout_section
from vllm.entrypoints.cli.text_table import amount, decision_lines, table
from vllm.v1.core.decode_cost import DecodeCost, PartCost
from vllm.v1.core.explain import Explanation, GroupReport, WhatIf
from vllm.v1.core.explain_decode import DecodeReport, PlacementDecode
from vllm.v1.core.explain_request import ByteUse, RequestCost


def render(report: Explanation) -> str:
    """Tables in this order: model and memory, state, requests, use of the bytes, decode steps,
    the layout of several devices, changed flags, decisions."""
    sections = [
        list(_head(report)),
        ["State", *table(_STATE_COLUMNS, [_state_row(g) for g in report.groups])],
        list(_pages(report)),
        [
            "A request costs",
            *table(_cost_columns(report), [_cost_row(c) for c in report.requests]),
        ],
        list(_capacity(report)),
        list(_tiers(report)),
        ["A full arena holds", *table(_use_columns(report), list(_use_rows(report)))],
        list(_findings(report)),
        *decode_sections(report.decode),
        layout_section(report.layout),
    ]
    if report.what_ifs:
        rows = [_what_if_row(w) for w in report.what_ifs if not w.refused]
        sections.append(["What if", *table(_what_if_columns(report), rows)])
        sections.append([f"  {w.flag}: not possible: {w.refused}" for w in _refused(report)])
    sections.append(["Decisions", *(f"  {line}" for line in decision_lines(report.decisions))])
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# ---- sections ----------------------------------------------------------------------------------

_STATE_COLUMNS = (
    "kind", "layers", "one layer keeps", "block", "tokens", "per token", "per sequence",
)  # fmt: skip


def _head(report: Explanation) -> Iterator[str]:
    yield f"{report.architecture} ({report.model}), {report.dtype}"
    yield (
        f"block size {report.block_size}, max model len {report.max_model_len:,}, "
        f"{report.max_num_batched_tokens:,} tokens per step, prefix caching "
        f"{'on' if report.prefix_caching else 'off'}"
    )
    if report.pipeline_parallel_size > 1:
        ranks = f", one of {report.tensor_parallel_size} ranks of each"
        yield f"bytes and pages of all {report.pipeline_parallel_size} pipeline stages together" + (
            ranks if report.tensor_parallel_size > 1 else ""
        )
    elif report.tensor_parallel_size > 1:
        yield f"bytes and pages of one of {report.tensor_parallel_size} tensor-parallel ranks"
    memory = report.memory
    weights = f"weights {amount(memory.weight_bytes)}"
    if memory.host_bytes:
        weights += f" and {amount(memory.host_bytes)} in host memory"
    if memory.device_bytes is not None:
        yield (
            f"device {amount(memory.device_bytes)}, {weights}, "
            f"uncommitted state {amount(memory.ring_bytes)}, "
            f"reserved {amount(memory.reserved_bytes or 0)}"
        )
    else:
        yield weights
    yield f"arena {memory.arena_bytes:,} bytes ({memory.source})"


def _tiers(report: Explanation) -> Iterator[str]:
    if report.tiers:
        yield "Behind the arena"
    for tier in report.tiers:
        yield (
            f"  {tier.name}: {tier.num_pages:,} pages, {tier.num_bytes:,} bytes, "
            f"{tier.capacity_tokens:,} tokens in requests of {report.max_model_len:,}"
        )


def _state_row(group: GroupReport) -> list[str]:
    paged = group.bytes_per_token is not None
    return [
        group.kind,
        str(group.layers),
        group.keeps,
        f"{group.data_bytes:,}",
        str(group.tokens_per_block) if paged else "all",
        f"{group.bytes_per_token:,.0f}" if group.bytes_per_token is not None else "",
        f"{group.bytes_per_sequence:,}" if group.bytes_per_sequence is not None else "",
    ]


def _pages(report: Explanation) -> Iterator[str]:
    yield f"Pages: {report.num_pages:,} of {report.page_bytes:,} bytes, one of them the null page"
    rows = [
        [g.kind, str(g.blocks_per_page), f"{g.stride_bytes:,}", f"{g.padding:.2%}"]
        for g in report.groups
    ]
    yield from table(("kind", "blocks per page", "bytes per block", "padding"), rows)


def _cost_columns(report: Explanation) -> list[str]:
    blocks = [f"{group.kind} blocks" for group in report.groups]
    return ["tokens", *blocks, "bytes", "pages alone", "fit at once", "tokens in all", "of ideal"]


def _cost_row(cost: RequestCost) -> list[str]:
    return [
        f"{cost.num_tokens:,}",
        *(f"{n:,}" for n in cost.blocks),
        f"{cost.num_bytes:,}",
        f"{cost.pages:,}",
        f"{cost.sequences:,}",
        f"{cost.tokens:,}",
        f"{cost.sequences / cost.ideal_sequences:.1%}",
    ]


def _capacity(report: Explanation) -> Iterator[str]:
    longest = report.max_model_len
    yield (
        f"Requests of {longest:,} tokens: {report.max_concurrency:.2f} at once, "
        f"{report.capacity_tokens:,} tokens."
    )
    if report.longest_request < longest:
        yield (
            f"The longest request that fits has {report.longest_request:,} tokens: the engine "
            f"would not start with --max-model-len {longest}."
        )
    if report.cached_turn_bytes:
        yield (
            f"With prefix caching one cached turn keeps {report.cached_turn_bytes:,} bytes, a copy "
            "of the recurrent state, beside its tokens' blocks; it can be evicted."
        )


def _use_columns(report: Explanation) -> list[str]:
    return ["at tokens per request", *(f"{use.num_tokens:,}" for use in report.uses)]


def _use_rows(report: Explanation) -> Iterator[list[str]]:
    def row(what: str, sizes: Sequence[int]) -> list[str]:
        whole = report.memory.arena_bytes
        return [what, *(f"{amount(size)} {size / whole:.1%}" for size in sizes)]

    for i, group in enumerate(report.groups):
        yield row(group.kind, [use.state_bytes[i] for use in report.uses])
    for i, waste in enumerate(report.uses[0].wastes):
        sizes = [use.wastes[i].num_bytes for use in report.uses]
        if any(sizes):
            yield row(waste.what, sizes)
    yield row("too little for one more such request", [use.left_bytes for use in report.uses])


def _findings(report: Explanation) -> Iterator[str]:
    """The largest waste and the best change, per length."""
    for i, use in enumerate(report.uses):
        text = f"At {use.num_tokens:,} tokens the largest waste is {_waste(report, use)}"
        best = _best_change(report, i)
        if best is not None:
            now, then = report.requests[i].sequences, best.sequences[i]
            text += f" Most would gain: {best.flag}, {now:,} -> {then:,} requests."
        yield text


def _waste(report: Explanation, use: ByteUse) -> str:
    waste = use.largest_waste
    share = waste.num_bytes / report.memory.arena_bytes
    flag = f"changed by {waste.flag}" if waste.flag else "no flag makes it smaller"
    return f"{share:.2%}: {waste.what} ({flag})."


def _best_change(report: Explanation, index: int) -> WhatIf | None:
    """The change on the same device that lets the most requests of a length run at once."""
    changes = [
        change
        for change in report.what_ifs
        if change.sequences and not change.flag.startswith("--tensor-parallel-size")
    ]
    best = max(changes, key=lambda change: change.sequences[index], default=None)
    if best is None or best.sequences[index] <= report.requests[index].sequences:
        return None
    return best


def _what_if_columns(report: Explanation) -> list[str]:
    lengths = [cost.num_tokens for cost in report.requests]
    return [
        "flag", "page", "pages",
        *(f"bytes at {n:,}" for n in lengths), *(f"fit at {n:,}" for n in lengths), "",
    ]  # fmt: skip


def _what_if_row(change: WhatIf) -> list[str]:
    return [
        change.flag,
        amount(change.page_bytes),
        f"{change.num_pages:,}",
        *(amount(size) for size in change.request_bytes),
        *(f"{n:,}" for n in change.sequences),
        change.note,
    ]


def _refused(report: Explanation) -> list[WhatIf]:
    return [change for change in report.what_ifs if change.refused]


_PART_COLUMNS = ("kind", "parts", "weights", "state", "per token", "GFLOP", "kernels", "ms")


def decode_sections(report: DecodeReport) -> list[list[str]]:
    """A row per placement, then the parts of the engine's own at the longest length."""
    own = report.placements[0]
    longest = max(own.costs, key=lambda cost: cost.context)
    rows = [_row(one) for one in report.placements]
    return [
        [_title(report), *table(_columns(own), rows)],
        [
            f"Parts of that step at {longest.context:,} tokens{_whose(own)}",
            *table(_PART_COLUMNS, list(_parts(longest))),
        ],
    ]


def _title(report: DecodeReport) -> str:
    device = report.batch.device
    return (
        f"A decode step of {report.batch.size:,} sequences, predicted for the {device.name} "
        f"({device.bytes_per_s / 1e12:.4g} TB/s, {device.flops_per_s / 1e12:,.4g} TFLOP/s, "
        f"{device.launch_s * 1e6:g} us per kernel)"
    )


def _whose(one: PlacementDecode) -> str:
    return f" of {', '.join(one.names)}" if one.names else ""


def _columns(own: PlacementDecode) -> list[str]:
    columns = ["placement" if own.names else "model"]
    columns += ["weights"] if own.weight_bytes is not None else []
    for cost in own.costs:
        columns.append(f"ms at {cost.context:,}")
        columns += ["speed"] if own.speedups else []
        columns.append("fit")
    return columns


def _row(one: PlacementDecode) -> list[str]:
    row = [", ".join(one.names) or "as configured"]
    row += [amount(one.weight_bytes)] if one.weight_bytes is not None else []
    for i, cost in enumerate(one.costs):
        row.append(f"{cost.seconds * 1e3:.3f}")
        row += [f"{one.speedups[i]:.2f}x"] if one.speedups else []
        row.append(f"{one.sequences[i]:,}")
    return row


def _parts(cost: DecodeCost) -> Iterator[list[str]]:
    for part in cost.parts:
        yield _part(part, cost.batch)
    whole = PartCost(
        "all", 1, cost.weight_bytes, cost.state_bytes, cost.flops, cost.launches, cost.seconds
    )
    yield _part(whole, cost.batch)


def _part(part: PartCost, batch: int) -> list[str]:
    return [
        part.kind,
        str(part.count),
        amount(part.weight_bytes),
        amount(part.state_bytes),
        amount((part.weight_bytes + part.state_bytes) / batch),
        f"{part.flops / 1e9:,.4g}",
        str(part.launches),
        f"{part.seconds * 1e3:.3f}",
    ]
