# SPDX-License-Identifier: Apache-2.0
"""Connectors of the engine pass the kit; each mistake planted in a sample is caught, by name."""

from __future__ import annotations

import json
import mmap
import os
import threading
from dataclasses import replace
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
    damage_files,
)
from vllm.testing.connectors import checks as kit_checks
from vllm.testing.connectors import engine as kit_engine
from vllm.testing.connectors import worker as kit_worker
from vllm.testing.connectors.checks import running
from vllm.v1.core.sched import kv_transfer

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


def files(num_ranks: int) -> dict[str, Any]:
    """Both sizes are those of all ranks together."""
    tier = {"type": "fs", "root_dir": "{storage}", "max_bytes": 200_000 * num_ranks}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 16_400 * num_ranks,  # the longest prompt fits, and no two
            "secondary_tiers": [tier],
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
        "connectors": [{**files(1), "kv_role": "kv_both"}, {**EXAMPLE, "kv_role": "kv_both"}]
    },
}


def damage_files_of_a_rank(
    scheduler: KVConnectorBase_V1, worker: KVConnectorBase_V1, storage: Path, damage: str
) -> bool:
    """Those of the second rank."""
    folders = storage.rglob("r1")
    return any([damage_files(scheduler, worker, folder, damage) for folder in folders])


CASES = {
    "offloading": ConnectorCase(
        OFFLOADING, ("window", "compressed", "hybrid_rows"), damage_host_memory
    ),
    "files": ConnectorCase(files(1), ("hybrid", "compressed")),
    "example": ConnectorCase(EXAMPLE, ("attention",)),
    "multi": ConnectorCase(MULTI, ("attention",)),
    "rows": ConnectorCase(
        ROWS, ("hybrid_rows",), loads=False, options={"speculative_config": EXTRACTION}
    ),
}
#: the same on two ranks
CASES["offloading-2"] = replace(CASES["offloading"], kinds=("window",), num_workers=2)
CASES["files-2"] = ConnectorCase(files(2), ("hybrid",), damage_files_of_a_rank, num_workers=2)
#: what several ranks may get wrong by themselves
CHECKS_OF_RANKS = ("exact-bits", "recompute", "late-reports", "random-lives")
RUNS = [(name, kind) for name, case in CASES.items() for kind in case.kinds]
#: mistakes that only several workers show, and one that shows on models with several groups
ON_TWO_RANKS = ("one-rank-reports", "one-rank-looks", "one-rank-raises")
ON_SEVERAL_GROUPS = ("expects-two-groups",)
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
    "wait-hangs": ("exact-bits", "wait-hangs"),
    "one-rank-reports": ("exact-bits", "never-settles"),
    "one-rank-looks": ("recompute", "broken-data-decoded"),
    "one-rank-raises": ("exact-bits", "raised"),
    "expects-two-groups": ("one-group", "raised"),
}


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_own_connectors(name: str, kind: str, tmp_path: Path) -> None:
    case = CASES[name]
    for check, run in CHECKS.items():
        if case.num_workers > 1 and check not in CHECKS_OF_RANKS:
            continue
        if run is check_random_lives:
            check_random_lives(case, kind, tmp_path / check, runs=6 // case.num_workers)
        else:
            run(case, kind, tmp_path / check)


def sample(tmp_path: Path, fault: str | None) -> ConnectorCase:
    config = {
        "kv_connector": "SampleConnector",
        "kv_connector_module_path": planted_connectors.__name__,
        "kv_connector_extra_config": {"storage": "{storage}", "fault": fault},
    }
    kinds = ("window",) if fault in ON_SEVERAL_GROUPS else ("attention",)
    workers = 2 if fault in ON_TWO_RANKS else 1
    loads = fault not in ON_SEVERAL_GROUPS
    return ConnectorCase(config, kinds, damage_sample, loads, num_workers=workers)


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_sample_passes(check: str, tmp_path: Path) -> None:
    case = sample(tmp_path, None)
    CHECKS[check](case, "attention", tmp_path / "one")
    if check in ("exact-bits", "recompute"):
        CHECKS[check](replace(case, num_workers=2), "attention", tmp_path / "two")


@pytest.mark.parametrize("fault", [*ON_TWO_RANKS, *ON_SEVERAL_GROUPS])
def test_what_one_rank_or_the_hybrid_allocator_hides(fault: str, tmp_path: Path) -> None:
    """Such mistakes pass where they do not show, so the check that finds them is needed."""
    case = replace(sample(tmp_path, fault), num_workers=1)
    check = "exact-bits" if fault in ON_SEVERAL_GROUPS else CAUGHT_BY[fault][0]
    CHECKS[check](case, case.kinds[0], tmp_path)


def test_the_allocator_off_is_one_group(tmp_path: Path) -> None:
    case = sample(tmp_path, "expects-two-groups")
    off = replace(case, options={"disable_hybrid_kv_cache_manager": True})
    for given, num_groups in ((case, 2), (off, 1)):
        with running(given, "window", tmp_path / str(num_groups)) as engine:
            assert len(engine.workers[0].groups) == num_groups


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
    if name == "wait-hangs":
        monkeypatch.setattr(kit_worker, "_WAIT_S", 0.5)
    case = sample(tmp_path, fault)
    with pytest.raises(ContractViolation) as caught:
        CHECKS[check](case, case.kinds[0], tmp_path)
    assert caught.value.name == name and VIOLATIONS[name] in str(caught.value)


def test_a_connector_for_next_turns_alone(tmp_path: Path) -> None:
    """Where prompts are not found again, the turns after their answers count, and are damaged."""
    case = sample(tmp_path, None)
    case.config["kv_connector"] = "NextTurnConnector"
    CHECKS["exact-bits"](case, "attention", tmp_path / "right")
    case.config["kv_connector_extra_config"]["fault"] = "broken-data-decoded"
    for check in ("recompute", "fail"):
        with pytest.raises(ContractViolation, match="^broken-data-decoded: .*corrupt: wrong-bits"):
            CHECKS[check](case, "attention", tmp_path / check)


def test_random_lives_say_what_is_damage(tmp_path: Path) -> None:
    with pytest.raises(ContractViolation) as caught:
        check_random_lives(sample(tmp_path, "broken-data-decoded"), "attention", tmp_path)
    assert caught.value.name == "broken-data-decoded"


def test_a_reader_that_maps_a_file_outlives_its_damage(tmp_path: Path) -> None:
    """A mapped file that gets shorter would end the process, without a word of the kit's."""
    path = tmp_path / "state.bin"
    path.write_bytes(b"state" * 2000)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert damage_files(None, None, tmp_path, "short")  # type: ignore[arg-type]
        assert os.fstat(file.fileno()).st_size == 10000 and mapped[-5:] == b"state"
    assert [one.name for one in tmp_path.iterdir()] == ["state.bin"]
    assert path.stat().st_size == 5000


def test_a_report_that_does_not_come_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kit_engine, "_SETTLE_S", 0.5)
    monkeypatch.setattr(kv_transfer, "_LOOK_S", 0.0)
    monkeypatch.setattr(kv_transfer, "_SLOW_S", 0.1)
    with pytest.raises(ContractViolation, match="never-settles"):
        CHECKS["exact-bits"](sample(tmp_path, "never-sent"), "attention", tmp_path)
    said = "\n".join(one.getMessage() for one in caplog.records)
    assert "SampleConnector.get_finished has not reported as sent: r1" in said
    assert [said.count(f"r{number}") for number in range(1, 5)] == [1, 1, 1, 1]


def test_what_is_still_being_loaded_is_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted request's connector hears so, before its blocks have anything worth keeping."""
    case = sample(tmp_path, None)
    finish = planted_connectors.SampleConnector.request_finished_all_groups
    told: dict[str, int] = {}

    def asked(self: Any, request: Any, block_ids: Any) -> Any:
        told[request.request_id] = request.num_computed_tokens
        return finish(self, request, block_ids)

    connector = planted_connectors.SampleConnector
    monkeypatch.setattr(connector, "request_finished_all_groups", asked)
    with running(case, "attention", tmp_path, report_delay=lambda: 3) as engine:
        engine.generate(kit_checks.PROMPTS[0])
        engine.evict_device()
        name = engine.add(kit_checks.PROMPTS[0])
        engine.step()
        assert engine.scheduler.transfer is not None
        assert engine.scheduler.transfer.loading == {name}
        engine.abort(name)
    assert told == {"r1": 73, name: 0}


def test_every_violation_is_planted() -> None:
    """`not-recomputed` is what all that goes unnoticed ends in, and has no mistake of its own."""
    assert {name for _, name in CAUGHT_BY.values()} == VIOLATIONS.keys() - {"not-recomputed"}


@pytest.mark.parametrize("num_workers", [0, 5])
def test_ranks_have_marks_of_their_own_up_to_a_number(num_workers: int) -> None:
    with pytest.raises(ValueError, match=f"num_workers {num_workers}: 1 to 4"):
        ConnectorCase(OFFLOADING, num_workers=num_workers)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kinds": ("atention", "window")}, "kinds atention: among attention, window, "),
        ({"kinds": ()}, "kinds none: among attention"),
        ({"config": ["OffloadingConnector"]}, "config .*: a JSON object"),
    ],
)
def test_a_case_that_would_test_nothing(fields: dict[str, Any], says: str) -> None:
    """Every check would be skipped, as for a kind that the connector does not serve."""
    with pytest.raises(ValueError, match=says):
        ConnectorCase(**{"config": OFFLOADING, **fields})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-connector", '{"kv_connector"'], "--kv-connector is no JSON: Expecting ':'"),
        (["--kv-connector", "{}", "--kv-connector-kinds", "all"], "kinds all: among attention"),
    ],
)
def test_wrong_options_are_named(options: list[str], says: str) -> None:
    line = ["pytest", "-q", "-p", "vllm.testing.connectors", "--pyargs"]
    line += ["vllm.testing.connectors.suite", "-k", "exact-bits-window", *options]
    ran = run_python(*line, "-p", "no:cacheprovider")
    assert "1 error" in ran.stdout and says in ran.stdout


def test_plugin_from_the_command_line(tmp_path: Path) -> None:
    config = json.dumps(sample(tmp_path, "one-rank-raises").config)
    line = ["pytest", "-q", "-p", "vllm.testing.connectors", "--pyargs"]
    line += ["vllm.testing.connectors.suite", "-k", "exact-bits", "-p", "no:cacheprovider"]
    line += ["--kv-connector", config, "--kv-connector-kinds", "attention"]
    line += ["--kv-connector-workers", "2"]
    ran = run_python(*line)
    assert "1 failed, 4 skipped" in ran.stdout and "raised: a call raised" in ran.stdout
