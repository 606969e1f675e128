# SPDX-License-Identifier: Apache-2.0
"""Connectors of the engine pass the kit; each mistake planted in a sample is caught, by name."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer import planted_connectors
from tests.distributed.kv_transfer.planted_connectors import damage_sample
from tests.forked_python import run_python
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.seal import num_threads
from vllm.testing.connectors import (
    CHECKS,
    VIOLATIONS,
    ConnectorCase,
    ContractViolation,
    check_random_lives,
)
from vllm.testing.connectors import checks as kit_checks
from vllm.testing.connectors import engine as kit_engine

pytestmark = pytest.mark.slow


def damage_host_memory(
    scheduler: KVConnectorBase_V1, worker: KVConnectorBase_V1, storage: Path, damage: str
) -> bool:
    """Flip a bit of everything that host memory holds, sealed: what changes between a copy and its
    digest nobody can notice."""
    transfers = worker._transfers  # type: ignore[attr-defined]
    together = threading.Barrier(num_threads())
    for waiting in [transfers._threads.submit(together.wait) for _ in range(together.parties)]:
        waiting.result()
    transfers._host.buffer.bitwise_xor_(1)
    return True


OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 300_000},
}
FILES: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 16_400,  # the longest prompt fits, and no two
        "secondary_tiers": [{"type": "fs", "root_dir": "{storage}", "max_bytes": 200_000}],
    },
}
EXAMPLE: dict[str, Any] = {
    "kv_connector": "ExampleConnector",
    "kv_connector_extra_config": {"shared_storage_path": "{storage}"},
}
ROWS: dict[str, Any] = {
    "kv_connector": "ExampleHiddenStatesConnector",
    "kv_connector_extra_config": {"shared_storage_path": "{storage}"},
}
EXTRACTION: dict[str, Any] = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
}
MULTI: dict[str, Any] = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [{**FILES, "kv_role": "kv_both"}, {**EXAMPLE, "kv_role": "kv_both"}]
    },
}
CASES = {
    "offloading": ConnectorCase(
        OFFLOADING, ("window", "compressed", "hybrid_rows"), damage_host_memory
    ),
    "files": ConnectorCase(FILES, ("hybrid", "compressed")),
    "example": ConnectorCase(EXAMPLE, ("attention",)),
    "multi": ConnectorCase(MULTI, ("attention",)),
    "rows": ConnectorCase(
        ROWS, ("hybrid_rows",), loads=False, options={"speculative_config": EXTRACTION}
    ),
}
RUNS = [(name, kind) for name, case in CASES.items() for kind in case.kinds]
#: the sample's mistake -> the check that finds it, and the violation's name
CAUGHT_BY = {
    "metadata-not-picklable": ("exact-bits", "metadata-not-picklable"),
    "step-changed": ("exact-bits", "step-changed"),
    "matched-too-much": ("exact-bits", "matched-too-much"),
    "wrong-bits": ("exact-bits", "wrong-bits"),
    "nothing-loaded": ("exact-bits", "nothing-loaded"),
    "raised": ("exact-bits", "raised"),
    "never-settles": ("exact-bits", "never-settles"),
    "blocks-leaked": ("abort", "blocks-leaked"),
    "broken-data-decoded": ("recompute", "broken-data-decoded"),
    "never-sent": ("exact-bits", "never-settles"),
    "descriptors-leaked": ("shutdown", "descriptors-leaked"),
    "threads-leaked": ("shutdown", "threads-leaked"),
}


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_own_connectors(name: str, kind: str, tmp_path: Path) -> None:
    for check, run in CHECKS.items():
        if run is check_random_lives:
            check_random_lives(CASES[name], kind, tmp_path / check, runs=6)
        else:
            run(CASES[name], kind, tmp_path / check)


def sample(tmp_path: Path, fault: str | None) -> ConnectorCase:
    config = {
        "kv_connector": "SampleConnector",
        "kv_connector_module_path": planted_connectors.__name__,
        "kv_connector_extra_config": {"storage": "{storage}", "fault": fault},
    }
    return ConnectorCase(config, ("attention",), damage_sample)


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_sample_passes(check: str, tmp_path: Path) -> None:
    CHECKS[check](sample(tmp_path, None), "attention", tmp_path)


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_planted_mistakes_are_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, name = CAUGHT_BY[fault]
    # What never comes is not waited for; the rest may take its time on a busy machine.
    if name == "never-settles":
        monkeypatch.setattr(kit_engine, "_SETTLE_S", 0.5)
    if check == "shutdown":
        monkeypatch.setattr(kit_checks, "_CLOSE_S", 0.5)
    with pytest.raises(ContractViolation) as caught:
        CHECKS[check](sample(tmp_path, fault), "attention", tmp_path)
    assert caught.value.name == name and VIOLATIONS[name] in str(caught.value)


def test_every_violation_is_planted() -> None:
    """`not-recomputed` is what all that goes unnoticed ends in, and has no mistake of its own."""
    assert {name for _, name in CAUGHT_BY.values()} == VIOLATIONS.keys() - {"not-recomputed"}


def test_plugin_from_the_command_line(tmp_path: Path) -> None:
    config = json.dumps(sample(tmp_path, "step-changed").config)
    line = ["pytest", "-q", "-p", "vllm.testing.connectors", "--pyargs"]
    line += ["vllm.testing.connectors.suite", "-k", "exact-bits", "-p", "no:cacheprovider"]
    line += ["--kv-connector", config, "--kv-connector-kinds", "attention"]
    ran = run_python(*line)
    assert "1 failed, 4 skipped" in ran.stdout and "step-changed" in ran.stdout
