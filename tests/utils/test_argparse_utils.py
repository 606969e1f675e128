# SPDX-License-Identifier: Apache-2.0
"""The command line's spelling rules."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest

from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags, fold_flag
from vllm.utils.options import FlagKind, config, option


@config
class Flags:
    """Flags of every kind."""

    max_model_len: int | None = option(default=None, kind=FlagKind.LENGTH, help="Length.")
    cache_bytes: int | None = option(default=None, kind=FlagKind.HUMAN_INT, help="Bytes.")
    kv_transfer_config: dict[str, Any] | None = option(
        default=None, aliases=("-kt",), help="A JSON object."
    )
    mode: Literal["fast", "safe"] = option(default="safe", name="run_mode", help="Mode.")
    level: int = option(default=2, aliases=("-O",), help="Level.")
    ratio: float = option(default=0.5, help="Ratio.")
    enable_it: bool = option(default=True, help="On or off; 100% free.")
    maybe: bool | None = option(default=None, help="Tri-state.")
    names: list[str] | None = option(default=None, help="Names.")
    path: str | None = option(default="p", help="A path.")
    token: bool | str | None = option(default=None, help="Token or flag.")
    chosen: int = option(default=4, resolved=True, help="Decided later.")
    hidden: int = option(default=1, flag=False, help="No flag.")


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="tool")
    made.add_argument("model_tag", nargs="?")
    made.add_argument("--config")
    add_dataclass_flags(made, Flags)
    return made


@pytest.mark.parametrize(
    ("token", "folded"),
    [
        ("--a_b", "--a-b"),
        ("--a_b=c_d", "--a-b=c_d"),
        ("--a_b.c_d.e_f=g_h", "--a-b.c_d.e_f=g_h"),
        ("--no_x_y", "--no-x-y"),
        ("-tp", "-tp"),
        ("a_b", "a_b"),
        ("--", "--"),
        ("", ""),
    ],
)
def test_fold(token: str, folded: str) -> None:
    assert fold_flag(token) == folded


GOOD: list[tuple[str, str, Any]] = [
    ("--max-model-len 8192", "max_model_len", 8192),
    ("--max_model_len=1k", "max_model_len", 1000),
    ("--max-model-len 1K", "max_model_len", 1024),
    ("--max-model-len 25.6k", "max_model_len", 25600),
    ("--max-model-len auto", "max_model_len", -1),
    ("--max-model-len -1", "max_model_len", -1),
    ("--max-model-len None", "max_model_len", None),
    ("--cache-bytes 2G", "cache_bytes", 2 * 2**30),
    ("--cache-bytes 1.5g", "cache_bytes", 1_500_000_000),
    ("--cache-bytes 1Ki", "cache_bytes", 1024),
    ("--cache-bytes 1.5Gi", "cache_bytes", 3 * 2**29),
    ("--cache_bytes 3M", "cache_bytes", 3 * 2**20),
    ("--cache_bytes 3m", "cache_bytes", 3_000_000),
    ("--cache_bytes=", "cache_bytes", None),
    ("--run-mode fast", "run_mode", "fast"),
    ("--run_mode=fast", "run_mode", "fast"),
    ("-O3", "level", 3),
    ("-O=1", "level", 1),
    ("-O 0", "level", 0),
    ("--level 1", "level", 1),
    ("--ratio 1e-3", "ratio", 0.001),
    ("--no-enable-it", "enable_it", False),
    ("--no_enable_it", "enable_it", False),
    ("--enable-it", "enable_it", True),
    ("", "enable_it", True),
    ("", "maybe", None),
    ("--no-maybe", "maybe", False),
    ("--names a b_c", "names", ["a", "b_c"]),
    ("--path None", "path", None),
    ("--path a_b", "path", "a_b"),
    ("--token", "token", True),
    ("--token abc", "token", "abc"),
    ("", "chosen", None),
    ("--chosen 5", "chosen", 5),
    (
        '--kv_transfer_config {"a_b":{"c":[1,null]}}',
        "kv_transfer_config",
        {"a_b": {"c": [1, None]}},
    ),
    ("--kv-transfer-config null", "kv_transfer_config", None),
    ("-kt.x 3", "kv_transfer_config", {"x": 3}),
    ("--kv_transfer_config.kv_role kv_both", "kv_transfer_config", {"kv_role": "kv_both"}),
    ("--kv-transfer-config.a.b_c=/x=y", "kv_transfer_config", {"a": {"b_c": "/x=y"}}),
    ("--kv-transfer-config.a true -kt.b 1.5", "kv_transfer_config", {"a": True, "b": 1.5}),
    ("--kv-transfer-config.a.b+ v1,2", "kv_transfer_config", {"a": {"b": ["v1", 2]}}),
    ("-kt.a+ 1 -kt.a+ 2", "kv_transfer_config", {"a": [1, 2]}),
    ('-kt {"a":{"x":1}} -kt.a.y 2', "kv_transfer_config", {"a": {"x": 1, "y": 2}}),
]


@pytest.mark.parametrize(("line", "name", "value"), GOOD)
def test_values(parser: FlexibleArgumentParser, line: str, name: str, value: Any) -> None:
    assert getattr(parser.parse_args(line.split()), name) == value


def test_positional_keeps_its_underscores(parser: FlexibleArgumentParser) -> None:
    args = parser.parse_args(["org/my_model", "--ratio", "2"])
    assert (args.model_tag, args.ratio) == ("org/my_model", 2.0)


def test_empty_word_is_a_value(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--names", "", "a"]).names == ["", "a"]


BAD: list[tuple[str, str]] = [
    ("--max-modl-len 3", "--max-modl-len .did you mean --max-model-len"),
    ("--max-model 3", "did you mean --max-model-len"),
    ("--zzz.y 3", "unrecognized arguments: --zzz.y"),
    ("--max-model-len 1.0001k", "not a whole number"),
    ("--max-model-len long", "'long' is not an integer"),
    ("--max-model-len 5q", "'5q' is not an integer"),
    ("--max-model-len 5ki", "'5ki' is not an integer"),
    ("--kv-transfer-config {", "argument .*--kv-transfer-config: not valid JSON.*got '{'"),
    ("-kt {} -kt.a", "-kt.a needs a value"),
    ("-kt.a --ratio 1", "-kt.a needs a value"),
    ("--ratio.x 3", "--ratio takes one value"),
    ("-kt.a 1 -kt.a.b 2", "'a' already has a value"),
    ("-kt [1] -kt.a 1", "not a JSON object"),
    ("--run-mode slow", "'slow' .*fast.*safe"),
    ("--level x", "invalid int value: 'x'"),
    ("--ratio", "expected one argument"),
    ("--hidden 3", "unrecognized arguments: --hidden"),
    ("--help=zzz", "no help for 'zzz'"),
    ("a b", "unrecognized arguments: 'b'"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_usage_errors(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    import re

    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split())
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.cli"), "warning", lambda text, *args: seen.append(text % args)
    )
    return seen


def test_repeated_flag_warns_and_the_last_wins(
    parser: FlexibleArgumentParser, warnings: list[str]
) -> None:
    assert parser.parse_args(["--ratio", "1", "--ratio=2"]).ratio == 2
    assert warnings == ["--ratio is given more than once; the last value is used"]
    assert parser.parse_args(["--enable-it", "--no-enable-it"]).enable_it is False
    assert len(warnings) == 2
    parser.parse_args(["--ratio", "1", "--level", "2"])
    assert len(warnings) == 2


def write_yaml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return str(path)


YAML = """
max_model_len: 100
run-mode: fast
enable-it: false
names: [a, b]
kv-transfer-config:
  kv_role: kv_both
  extra: {x: 1}
"""


def test_config_file(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    args = parser.parse_args(["--config", write_yaml(tmp_path, YAML), "tag"])
    assert (args.max_model_len, args.run_mode, args.enable_it) == (100, "fast", False)
    assert (args.names, args.model_tag) == (["a", "b"], "tag")
    assert args.kv_transfer_config == {"kv_role": "kv_both", "extra": {"x": 1}}


def test_command_line_is_stronger_than_the_file(
    parser: FlexibleArgumentParser, tmp_path: Path, warnings: list[str]
) -> None:
    path = write_yaml(tmp_path, YAML)
    line = ["--max-model-len", "7", "--enable-it", "-kt.extra.y", "2", f"--config={path}"]
    args = parser.parse_args(line)
    assert args.max_model_len == 7 and args.enable_it is True
    assert args.kv_transfer_config == {"kv_role": "kv_both", "extra": {"x": 1, "y": 2}}
    assert warnings == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope: 1", "unknown flag 'nope'"),
        ("max_model_length: 1", "did you mean max-model-len?"),
        ("path: {a: 1}", "path takes no nested keys"),
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("enable-it: 3", "must be true or false"),
        ("level: x", "invalid int value"),
        ("path:", "path has no value; give it one or leave it out"),
        ("config: more.yaml", "a flag file cannot name another one"),
    ],
)
def test_bad_config_file(
    parser: FlexibleArgumentParser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", write_yaml(tmp_path, text)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0123", "1.10", "1_000", "yes", "2026-11-29", "null-ish", "1e3"])
def test_text_is_taken_as_the_file_writes_it(
    parser: FlexibleArgumentParser, tmp_path: Path, text: str
) -> None:
    """YAML takes the key 0123 for 83, the name 1.10 for 1.1, and yes for true."""
    args = parser.parse_args(
        ["--config", write_yaml(tmp_path, f"path: {text}\nnames: [{text}, b]\nlevel: 7")]
    )
    assert (args.path, args.names, args.level) == (text, [text, "b"], 7)


def test_a_config_file_of_another_encoding_is_named(
    parser: FlexibleArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_bytes(b"path: \xff\xfe")
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", str(path)])
    assert f"--config {path}: not valid YAML" in capsys.readouterr().err


def test_config_file_switches(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    args = parser.parse_args(["--config", write_yaml(tmp_path, "no_enable_it: true\ntoken: true")])
    assert args.enable_it is False and args.token is True
    args = parser.parse_args(
        ["--config", write_yaml(tmp_path, "no-enable-it: false\ntoken: false")]
    )
    assert args.enable_it is True and args.token is None


def test_the_level_flag_takes_keys_of_the_compilation_config() -> None:
    parser = FlexibleArgumentParser(prog="tool")
    parser.add_argument("-O", "--level", type=int)
    parser.add_argument("-cc", "--compilation-config", metavar="JSON", type=json.loads)
    args = parser.parse_args(["-O2", "-O.mode=3", "-cc.backend", "eager"])
    assert args.level == 2 and args.compilation_config == {"mode": 3, "backend": "eager"}


def test_missing_config_file(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", "/no/such/file"])
    assert "/no/such/file: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topic", "present", "absent"),
    [
        ("Flags", "--ratio", "model_tag"),
        ("flags", "100% free", "model_tag"),
        ("ratio", "Ratio.", "--level"),
        ("run_mode", "{fast,safe}", "--level"),
        ("O", "Level.", "--ratio"),
        ("all", "model_tag", "nothing"),
        ("listgroup", "Flags (", "--ratio"),
    ],
)
def test_help_topics(
    parser: FlexibleArgumentParser,
    capsys: pytest.CaptureFixture[str],
    topic: str,
    present: str,
    absent: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([f"--help={topic}"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert present in text and absent not in text


def test_subcommands_apply_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    top = FlexibleArgumentParser(prog="tool")
    serve = top.add_subparsers(dest="command").add_parser("serve")
    add_dataclass_flags(serve, Flags)
    args = top.parse_args(["serve", "--max_model_len", "1k", "--kv_transfer_config.a_b", "c_d"])
    assert (args.command, args.max_model_len) == ("serve", 1000)
    assert args.kv_transfer_config == {"a_b": "c_d"}
    with pytest.raises(SystemExit):
        top.parse_args(["serve", "--max-modl-len", "3"])
    assert "unrecognized arguments: --max-modl-len" in capsys.readouterr().err


def test_everything_after_two_dashes_is_left_alone() -> None:
    parser = FlexibleArgumentParser(prog="tool")
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--", "--a_b", "c"]).rest == ["--a_b", "c"]
