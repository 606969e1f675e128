# SPDX-License-Identifier: Apache-2.0
"""Replies cut at random places, and what their pieces add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from vllm.tool_parsers import ToolDelta, ToolParser

#: content, then (name, arguments) of each call
Reply = tuple[str, list[tuple[str, str]]]


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` cut at the given places."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def joined(deltas: Sequence[ToolDelta]) -> Reply:
    """What a client makes of the deltas; checks the order of indices and where names appear."""
    content = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1 and call.arguments
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + call.arguments)
    return content, calls


def whole(make: Callable[[], ToolParser], text: str) -> Reply:
    """The reply parsed at once."""
    return joined([make().parse(text)])


def streamed(make: Callable[[], ToolParser], parts: Sequence[str]) -> Reply:
    """The reply parsed piece by piece."""
    parser = make()
    return joined([*(parser.feed(part) for part in parts), parser.finish()])


#: text without structure, and text that nearly has some
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_call", "<function=", "<function=f>", "</function>"),
        *("<parameter=", "<parameter=s>", "<parameter=n>", "</parameter>", "</param", "\n", "  "),
        *('{"name": "f", "arguments": {', '{"arguments":{"a":1},"name":"g"}', "}", "}}", "{", '"'),
        *("[", "]", "[]", '{"name": "f", "parameters": {}}', ",", ":", '"name"', '"arguments"'),
        *("\\", '\\"', "null", "true", "1.5", "é", "🙂", "x", "<", ">", "text "),
    ]
)
MESSY = st.lists(FRAGMENTS, max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 1000), max_size=12)
