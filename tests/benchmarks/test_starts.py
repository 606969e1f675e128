# SPDX-License-Identifier: Apache-2.0
"""The benchmark of starts passes settings on faithfully and does not hide a failed start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import starts
from benchmarks.offline import default_settings
from vllm.benchmarks.startup import add_cli_args, server_part
from vllm.utils.argparse_utils import FlexibleArgumentParser


def test_flags_say_what_the_settings_say() -> None:
    found = starts.flags(
        {"model": "m", "max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False}
    )
    assert found == ["--model", "m", "--max-num-seqs", "8", "--enforce-eager",
                     "--no-enable-prefix-caching"]  # fmt: skip


def test_the_server_takes_the_flags() -> None:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    argv = starts.flags(default_settings())
    args = parser.parse_args(argv)
    assert server_part(argv) == argv
    assert args.max_num_seqs == 256 and args.enable_prefix_caching is False


def test_a_start_is_what_the_process_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_LLM", "import sys; print(sys.argv[1], 'ready after 1.5')")
    assert starts.llm_start(tmp_path, {"model": "ready after 9"}, {**os.environ}) == 1.5


def test_a_failed_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_LLM", "raise SystemExit('no-such-model')")
    with pytest.raises(SystemExit, match="no-such-model"):
        starts.llm_start(tmp_path, {"model": "m"}, {**os.environ})
