# SPDX-License-Identifier: Apache-2.0
"""`FlexibleArgumentParser`: the command line's spelling rules on top of argparse."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm.utils.dataclass_flags import add_dataclass_flags
from vllm.utils.options import flag_name, merged

__all__ = ["FlexibleArgumentParser", "add_dataclass_flags", "fold_flag"]

logger = logging.getLogger("vllm.cli")
_NAME = re.compile(r"--([A-Za-z][^.=]*)(.*)", re.DOTALL)
_DOTTED = re.compile(r"(-{1,2}[A-Za-z][\w-]*)\.([^=]+)(?:=(.*))?", re.DOTALL)
#: parsers with more flags list groups instead of flags
_MANY = 60


def fold_flag(token: str) -> str:
    """`--a_b.c_d=e_f` -> `--a-b.c_d=e_f`: only the name before the first `.` or `=` is folded."""
    match = _NAME.fullmatch(token)
    return token if match is None else flag_name(match[1]) + match[2]


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

    # ---- parsing -------------------------------------------------------------------------------

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        args = sys.argv[1:] if args is None else list(args)
        if self._subparsers is not None:  # the subcommand's own parser applies the rules
            return super().parse_known_args(args, namespace)
        end = args.index("--") if "--" in args else len(args)
        words = [fold_flag(arg) for arg in args[:end]]
        self._answer_selected_help(words)
        words, objects = self._take_dotted(words)
        if "--config" in self._option_string_actions:
            words = self._with_config_file(words)
        else:
            self._given(words)
        parsed, unknown = super().parse_known_args([*words, *args[end:]], namespace)
        for dest, (flag, value) in objects.items():
            base = getattr(parsed, dest)
            base = {"mode": base} if isinstance(base, int) else base or {}
            if not isinstance(base, dict):
                self.error(f"{flag}.…: the value given for {flag} is not a JSON object")
            setattr(parsed, dest, merged(base, value))
        return parsed, unknown

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        return parsed

    def _take_dotted(
        self, words: list[str]
    ) -> tuple[list[str], dict[str, tuple[str, dict[str, Any]]]]:
        """The words without dotted flags, and the objects these build: dest -> (flag, object)."""
        plain: list[str] = []
        objects: dict[str, tuple[str, dict[str, Any]]] = {}
        rest = iter(words)
        for word in rest:
            key = _DOTTED.fullmatch(word)
            if key is None or key[1] not in self._option_string_actions:
                plain.append(word)
                continue
            flag, path, value = key.groups()
            value = next(rest, None) if value is None else value
            if value is None or value.startswith("--"):
                self.error(f"{word} needs a value")
            # Older command lines write the keys of the compilation config as -O.key.
            name = "-cc" if flag == "-O" and "-cc" in self._option_string_actions else flag
            action = self._option_string_actions[name]
            if action.metavar != "JSON":
                self.error(f"{flag} takes one value, so {flag}.{path} has no meaning")
            self._put(objects.setdefault(action.dest, (flag, {}))[1], path, value, word)
        return plain, objects

    def _put(self, node: dict[str, Any], path: str, text: str, word: str) -> None:
        """Store a value under a dotted path; a path that ends in `+` appends to a list."""
        *parents, last = path.removesuffix("+").split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                self.error(f"{word}: {part!r} already has a value")
        if path.endswith("+"):
            node[last] = [*node.get(last, []), *map(_json_or_text, text.split(","))]
        else:
            node[last] = _json_or_text(text)

    def _given(self, words: list[str]) -> set[str]:
        """The dests that the words give a value; a flag given twice is warned about."""
        given: set[str] = set()
        for word in words:
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action is None:
                continue
            if action.dest in given and not isinstance(action, argparse._AppendAction):
                logger.warning("%s is given more than once; the last value is used", name)
            given.add(action.dest)
        return given

    def _refuse_unknown(self, unknown: list[str]) -> NoReturn:
        parts = []
        for arg in unknown:
            name = re.split(r"[=.]", fold_flag(arg), maxsplit=1)[0]
            close = difflib.get_close_matches(name, self._option_string_actions, n=3)
            hint = f" (did you mean {', '.join(close)}?)" if close else ""
            parts.append(f"{arg}{hint}" if arg.startswith("-") else repr(arg))
        self.error("unrecognized arguments: " + " ".join(parts))

    # ---- config file ---------------------------------------------------------------------------

    def _with_config_file(self, words: list[str]) -> list[str]:
        """The words and, behind them, the flags of the file that they name and do not give."""
        finder = argparse.ArgumentParser(self.prog, add_help=False, allow_abbrev=False)
        finder.add_argument("--config", metavar="FILE")
        found, words = finder.parse_known_args(words)
        given = self._given(words)
        if found.config is None:
            return words
        for key, value, text in self._read_config_file(found.config):
            action, flags = self._flags_of(f"--config {found.config}", key, value, text)
            if action.dest not in given:
                words += flags
        return words

    def _read_config_file(self, path: str) -> list[tuple[str, Any, Any]]:
        """Keys, values, and the same values with every number or word as the file writes it."""
        import yaml

        class TextLoader(yaml.SafeLoader):
            """Makes a string of every scalar: a key 0123 is no octal number."""

            yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

        try:
            content = Path(path).read_text(encoding="utf-8")
            values, texts = yaml.safe_load(content), yaml.load(content, Loader=TextLoader)
        except OSError as error:
            self.error(f"--config {path}: {error.strerror}")
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self.error(f"--config {path}: not valid YAML: {error}")
        if values is None:
            return []
        if not isinstance(values, dict):
            self.error(f"--config {path}: expected a mapping of flags to values")
        pairs = zip(values.items(), texts.values(), strict=True)
        return [(str(key), value, text) for (key, value), text in pairs]

    def _flags_of(
        self, where: str, key: str, value: Any, text: Any
    ) -> tuple[argparse.Action, list[str]]:
        """The action of a key of the file, and the words that give it the value."""
        flag = flag_name(key)
        action = self._option_string_actions.get(flag)
        if action is None:
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            hint = f"; did you mean {close[0].lstrip('-')}?" if close else ""
            self.error(f"{where}: unknown flag {key!r}{hint}")
        if flag == "--config":
            self.error(f"{where}: a flag file cannot name another one; put its flags here")
        if value is None and action.metavar != "JSON":
            self.error(f"{where}: {key} has no value; give it one or leave it out")
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                self.error(f"{where}: {key} must be true or false, got {value!r}")
            name = flag.removeprefix("--no-").removeprefix("--")
            is_on = value is not flag.startswith("--no-")
            return action, [f"--{name}" if is_on else f"--no-{name}"]
        if isinstance(value, bool) and action.nargs in (0, argparse.OPTIONAL):
            return action, [flag] if value else []
        if action.metavar == "JSON":
            return action, [flag, json.dumps(value)]
        if isinstance(value, dict):
            self.error(f"{where}: {key} takes no nested keys, got {value!r}")
        return action, [flag, *map(str, text if isinstance(text, list) else [text])]

    # ---- help ----------------------------------------------------------------------------------

    def format_help(self) -> str:
        return self._overview() if self._is_large() else super().format_help()

    def format_usage(self) -> str:
        if self._is_large():
            return f"{self._short_usage()}; --help lists the flag groups\n"
        return super().format_usage()

    def _is_large(self) -> bool:
        return len(self._option_string_actions) > _MANY

    def _short_usage(self) -> str:
        named = [
            (str(action.metavar or action.dest), action.required)
            for action in self._get_positional_actions()
        ]
        words = [name if required else f"[{name}]" for name, required in named]
        return " ".join(["usage:", self.prog, *words, "[flags]"])

    def _overview(self) -> str:
        """The groups, and how to ask for more."""
        groups = [
            f"  {group.title} ({len(group._group_actions)}): {group.description or ''}".rstrip(": ")
            for group in self._action_groups
            if group._group_actions
        ]
        return "\n".join(
            [
                self._short_usage(),
                "",
                *([self.description, ""] if self.description else []),
                "flag groups:",
                *groups,
                "",
                "--help=<group> lists a group, --help=<flag> explains a flag, --help=all lists "
                "everything.",
                "",
            ]
        )

    def _answer_selected_help(self, words: list[str]) -> None:
        for word in words:
            if word.startswith("--help="):
                topic = word.removeprefix("--help=")
                print(self._help_on(topic))
                self.exit()

    def _help_on(self, topic: str) -> str:
        """Help on a group, a flag, `listgroup` or `all`; a usage error for anything else."""
        if topic == "all":
            return super().format_help()
        if topic == "listgroup":
            return self._overview()
        for group in self._action_groups:
            if group.title is not None and group.title.lower() == topic.lower():
                return self._format(group.title, group.description, group._group_actions)
        name = topic.lstrip("-").replace("_", "-")
        for option in (f"--{name}", f"-{name}"):
            if option in self._option_string_actions:
                return self._format("flag", None, [self._option_string_actions[option]])
        self.error(f"no help for {topic!r}; try --help=all")

    def _format(
        self, title: str, description: str | None, actions: Sequence[argparse.Action]
    ) -> str:
        formatter = self._get_formatter()
        formatter.start_section(title)
        formatter.add_text(description)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()


def _json_or_text(text: str) -> Any:
    """The value of a dotted flag: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
