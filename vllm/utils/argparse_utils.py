# SPDX-License-Identifier: Apache-2.0
"""`FlexibleArgumentParser`: the command line's spelling rules on top of argparse."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.utils.dataclass_flags import add_dataclass_flags
from vllm.utils.flag_help import flag_help, overview, short_usage
from vllm.utils.flag_rewrite import FlagRewriter, RewriteError

__all__ = ["FlexibleArgumentParser", "add_dataclass_flags", "fold_flag"]

logger = logging.getLogger("vllm.cli")
_NAME = re.compile(r"(--?)([A-Za-z][^.=]*)(.*)", re.DOTALL)


def fold_flag(token: str) -> str:
    """`--a_b.c_d=e_f` -> `--a-b.c_d=e_f`: only the name before the first `.` or `=` is folded."""
    match = _NAME.fullmatch(token)
    if match is None or match[1] != "--":
        return token
    return "--" + match[2].replace("_", "-") + match[3]


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse with vLLM's conveniences.

    `_` and `-` are the same in flag names; a repeated flag warns and the last wins; dotted flags
    (`--kv-transfer-config.kv_role kv_both`, `--a.b+ x,y`) build JSON; `--config FILE.yaml` holds
    flags; `--help=<group>`, `--help=<flag>`, `--help=listgroup` and `--help=all` select help;
    unknown flags are answered with the nearest known ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is None:
            import sys

            args = sys.argv[1:]
        return super().parse_known_args(self._rewrite(list(args)), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        return parsed

    def format_help(self) -> str:
        return overview(self) if self._is_large() else super().format_help()

    def format_usage(self) -> str:
        if self._is_large():
            return f"{short_usage(self)}; --help lists the flag groups\n"
        return super().format_usage()

    def full_help(self) -> str:
        """Every flag, by group."""
        return super().format_help()

    def _rewrite(self, args: list[str]) -> list[str]:
        """Spelling rules, unless a subcommand's own parser will apply them."""
        if self._subparsers is not None:
            return args
        self._answer_selected_help(args)
        try:
            rewriter = FlagRewriter(self._option_string_actions)
            return rewriter.rewrite([fold_flag(arg) for arg in self._before_dashes(args)]) + (
                args[args.index("--") :] if "--" in args else []
            )
        except RewriteError as error:
            self.error(str(error))

    @staticmethod
    def _before_dashes(args: list[str]) -> list[str]:
        return args[: args.index("--")] if "--" in args else args

    def _answer_selected_help(self, args: list[str]) -> None:
        for arg in self._before_dashes(args):
            if arg.startswith("--help="):
                topic = arg.removeprefix("--help=")
                text = self.full_help() if topic == "all" else flag_help(self, topic)
                if text is None:
                    self.error(f"no help for {topic!r}; try --help=all")
                print(text)
                self.exit()

    def _is_large(self) -> bool:
        return len(self._option_string_actions) > 60

    def _known_flags(self) -> list[str]:
        flags = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags.extend(parser._option_string_actions)
        return flags

    def _refuse_unknown(self, unknown: list[str]) -> NoReturn:
        known = sorted(set(self._known_flags()))
        parts = []
        for arg in unknown:
            if not arg.startswith("-"):
                parts.append(repr(arg))
                continue
            name = re.split(r"[=.]", fold_flag(arg), maxsplit=1)[0]
            close = difflib.get_close_matches(name, known, n=3)
            parts.append(f"{arg}" + (f" (did you mean {', '.join(close)}?)" if close else ""))
        self.error("unrecognized arguments: " + " ".join(parts))
