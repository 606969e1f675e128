# SPDX-License-Identifier: Apache-2.0
"""Help for parsers with many flags: an overview, one group, one flag, or everything."""

from __future__ import annotations

import argparse


def flag_help(parser: argparse.ArgumentParser, topic: str) -> str | None:
    """Help on `topic`: a group, a flag or `listgroup`; None if it is unknown."""
    if topic == "listgroup":
        return overview(parser)
    for group in parser._action_groups:
        if group.title is not None and group.title.lower() == topic.lower():
            return _format(parser, group.title, group.description, group._group_actions)
    name = topic.lstrip("-").replace("_", "-")
    found = [a for a in parser._actions if "--" + name in a.option_strings]
    if not found:
        found = [a for a in parser._actions if "-" + name in a.option_strings]
    return _format(parser, None, None, found) if found else None


def _format(
    parser: argparse.ArgumentParser,
    title: str | None,
    description: str | None,
    actions: list[argparse.Action],
) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title or "flag")
    formatter.add_text(description)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def short_usage(parser: argparse.ArgumentParser) -> str:
    """One line, without the flags."""
    words = [action.metavar or action.dest for action in parser._get_positional_actions()]
    return " ".join(["usage:", parser.prog, *(f"[{word}]" for word in words), "[flags]"])


def overview(parser: argparse.ArgumentParser) -> str:
    """The groups, and how to ask for more."""
    lines = [short_usage(parser), ""]
    if parser.description:
        lines += [parser.description, ""]
    lines.append("flag groups:")
    for group in parser._action_groups:
        if group._group_actions:
            count = len(group._group_actions)
            lines.append(f"  {group.title} ({count}): {group.description or ''}".rstrip(": "))
    lines += [
        "",
        "--help=<group> lists a group, --help=<flag> explains a flag, --help=all lists everything.",
        "",
    ]
    return "\n".join(lines)
