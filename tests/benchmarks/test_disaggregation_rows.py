# SPDX-License-Identifier: Apache-2.0
"""Rows and commands of the benchmark of two engines."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.disaggregation import Row, Times, make_parser, row_of, serve_command, table


def test_a_row_has_the_medians() -> None:
    runs = [
        Times(9.0, 60.0 + i, 50.0, 20.0, 10.0 * i, 5.0, 8.0, 40.0, same=i != 1) for i in range(3)
    ]
    row = row_of(512, runs)
    assert (row.prompts, row.same, row.fetched_ms) == (3, 2, 61.0)
    assert row.after_transfer == 11 / 8
    assert table([row]).splitlines()[-1] == (
        "| 512 | 9.0 ms | 61.0 ms | 50.0 ms | 20.0 ms | 10.0 ms | 5.0 ms | 8.0 ms | 40.0 ms "
        "| 1.38 | 2 of 3 |"
    )


def test_older_figures_have_no_parts() -> None:
    row = Row(512, 3, 3, 9.0, 60.0, 50.0, 8.0, 40.0)
    head, _, only = table([row]).splitlines()
    assert "wait" not in head and head.count("|") == only.count("|") == 9
    assert only == "| 512 | 9.0 ms | 60.0 ms | 50.0 ms | 8.0 ms | 40.0 ms | 1.25 | 3 of 3 |"


def test_servers_hold_the_longest_prompt_and_its_answer() -> None:
    args = make_parser().parse_args(["--lengths", "8,300", "--answer-tokens", "20"])
    command = serve_command(args, Path("model"), "kv_producer")
    assert command[command.index("--max-model-len") + 1] == "321"
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_role"] == "kv_producer"
    assert transfer["kv_connector_extra_config"]["staging_bytes"] == args.staging_mb * 10**6
