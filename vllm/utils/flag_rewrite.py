# SPDX-License-Identifier: Apache-2.0
"""Rewriting of a command line to what argparse understands: dotted flags, `-O2`, YAML files."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
from pathlib import Path
from typing import Any

from vllm.transformers_utils.overrides import merged
from vllm.utils.flag_types import json_or_text, json_value

logger = logging.getLogger("vllm.cli")
_LEVEL = re.compile(r"-O=?(\d+)")
_DOTTED = re.compile(r"(-{1,2}[A-Za-z][\w-]*)\.([^=]+)(?:=(.*))?", re.DOTALL)


class RewriteError(ValueError):
    """A usage error, in words for the user."""


class FlagRewriter:
    """Applies the rules for one parser, given its option strings."""

    def __init__(self, options: dict[str, argparse.Action]) -> None:
        self._options = options

    def rewrite(self, args: list[str]) -> list[str]:
        """`args` (already folded) with the config file, dotted flags and levels expanded."""
        plain, dotted, config_file = self._split(args)
        self._warn_repeated(plain)
        if config_file is not None:
            given = self._given(plain)
            for action, tokens in self._file_flags(config_file):
                if action.dest not in given:
                    plain.extend(tokens)
        for flag, value in dotted.items():
            plain = self._merge_json(plain, flag, value)
        return plain

    def _split(self, args: list[str]) -> tuple[list[str], dict[str, Any], str | None]:
        plain: list[str] = []
        dotted: dict[str, Any] = {}
        config_file: str | None = None
        rest = iter(args)
        for arg in rest:
            name, _, inline = arg.partition("=")
            level = _LEVEL.fullmatch(arg)
            key = _DOTTED.fullmatch(arg)
            if level and "-O" in self._options:
                plain += ["-O", level[1]]
            elif name == "--config" and "--config" in self._options:
                config_file = inline or next(rest, None)
                if config_file is None:
                    raise RewriteError("--config needs a file")
            elif key and key[1] in self._options:
                value = key[3] if key[3] is not None else next(rest, None)
                if value is None or value.startswith("--"):
                    raise RewriteError(f"{arg} needs a value")
                self._put(dotted, key[1], key[2], value)
            else:
                plain.append(arg)
        return plain, dotted, config_file

    def _put(self, dotted: dict[str, Any], flag: str, path: str, text: str) -> None:
        """Store the value of `flag.path`; a path that ends in `+` appends to a list."""
        action = self._options[flag]
        if flag == "-O" and "-cc" in self._options:
            # Older command lines write the keys of the compilation config as -O.key.
            action = self._options["-cc"]
        if action.metavar != "JSON":
            raise RewriteError(f"{flag} takes one value, so {flag}.{path} has no meaning")
        append = path.endswith("+")
        *parents, last = path.removesuffix("+").split(".")
        node = dotted.setdefault(action.option_strings[-1], {})
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise RewriteError(f"{flag}.{path}: {part!r} already has a value")
        if append:
            node.setdefault(last, [])
            node[last] = [*node[last], *(json_or_text(item) for item in text.split(","))]
        else:
            node[last] = json_or_text(text)

    def _merge_json(self, plain: list[str], flag: str, value: Any) -> list[str]:
        """Fold a dotted flag's object into the JSON given for the whole flag, if any."""
        action = self._options[flag]
        kept: list[str] = []
        base: Any = {}
        rest = iter(plain)
        for arg in rest:
            name, eq, inline = arg.partition("=")
            if self._options.get(name) is action:
                text = inline if eq else next(rest, "")
                try:
                    base = json_value(text)
                except argparse.ArgumentTypeError as error:
                    raise RewriteError(f"argument {flag}: {error}") from None
            else:
                kept.append(arg)
        if isinstance(base, int):
            base = {"mode": base}
        if not isinstance(base, dict):
            raise RewriteError(f"{flag}.…: the value given for {flag} is not a JSON object")
        return [*kept, flag, json.dumps(merged(base, value))]

    def _given(self, plain: list[str]) -> set[str]:
        names = (arg.partition("=")[0] for arg in plain)
        return {self._options[name].dest for name in names if name in self._options}

    def _warn_repeated(self, plain: list[str]) -> None:
        seen: dict[str, str] = {}
        for arg in plain:
            name = arg.partition("=")[0]
            action = self._options.get(name)
            if action is None or isinstance(action, argparse._AppendAction):
                continue
            if action.dest in seen:
                logger.warning("%s is given more than once; the last value is used", name)
            seen[action.dest] = name

    def _file_flags(self, path: str) -> list[tuple[argparse.Action, list[str]]]:
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RewriteError(f"--config {path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise RewriteError(f"--config {path}: not valid YAML: {error}") from None
        if content is None:
            return []
        if not isinstance(content, dict):
            raise RewriteError(f"--config {path}: expected a mapping of flags to values")
        return [self._file_flag(path, str(key), value) for key, value in content.items()]

    def _file_flag(self, path: str, key: str, value: Any) -> tuple[argparse.Action, list[str]]:
        flag = "--" + key.replace("_", "-")
        action = self._options.get(flag)
        if action is None:
            close = difflib.get_close_matches(flag, self._options, n=1)
            hint = f"; did you mean {close[0].lstrip('-')}?" if close else ""
            raise RewriteError(f"--config {path}: unknown flag {key!r}{hint}")
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                raise RewriteError(f"--config {path}: {key} must be true or false, got {value!r}")
            negated = flag.startswith("--no-")
            name = flag.removeprefix("--no-" if negated else "--")
            return action, [("--" if value is not negated else "--no-") + name]
        if isinstance(value, bool) and action.nargs in (0, argparse.OPTIONAL):
            return action, [flag] if value else []
        if action.metavar == "JSON":
            return action, [flag, json.dumps(value)]
        if isinstance(value, dict):
            raise RewriteError(f"--config {path}: {key} takes no nested keys, got {value!r}")
        if isinstance(value, list):
            return action, [flag, *(str(item) for item in value)]
        return action, [flag, str(value)]
