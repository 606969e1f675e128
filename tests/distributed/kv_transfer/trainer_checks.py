# SPDX-License-Identifier: Apache-2.0
"""What every connector that hands rows to a trainer has to do, whatever the rows pass through."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.distributed.kv_transfer.extraction_harness import Harness, row_values
from tests.distributed.kv_transfer.offload_engines import drain, engine, prompt
from tests.distributed.kv_transfer.offload_engines import run as generate
from tests.distributed.kv_transfer.test_connector_kit import EXTRACTION
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.hidden_states_record import Rows
from vllm.testing.connectors import CHECKS, ConnectorCase, check_random_lives
from vllm.v1.request import RequestStatus

_FILES = "ExampleHiddenStatesConnector"


class Reader(Protocol):
    """A trainer's side."""

    def get(self, timeout_s: float | None = None) -> Rows | None: ...


#: of the engine that gave such `kv_transfer_params`
Open = Callable[[dict[str, Any]], AbstractContextManager[Reader]]


def run(harness: Harness, name: str, num_prompt: int, **params: Any) -> set[str]:
    """A request of two output tokens; returns those reported as sent meanwhile."""
    harness.add(name, num_prompt, params or None)
    sent = harness.step({name: num_prompt})
    harness.sample(name, 7)
    sent |= harness.step({name: 1})
    harness.sample(name, 8)
    keep, reply = harness.finish(name)
    assert keep and reply is not None and reply["hidden_states_id"] == name
    return sent


def check_slow_trainer(
    harness: Harness, open_reader: Callable[[], AbstractContextManager[Reader]]
) -> None:
    """Requests keep their blocks; there is room for one of them."""
    sent: set[str] = set()
    for i in range(6):
        sent |= run(harness, f"r{i}", 50)
    sent |= harness.step()
    assert len(sent) < 6, "the others wait in the cache"
    with open_reader() as reader:
        for i in range(6):
            rows = None
            while rows is None:
                sent |= harness.step()
                with suppress(TimeoutError):
                    rows = reader.get(0.02)
            assert rows.request_id == f"r{i}"
            assert torch.equal(rows.hidden_states, row_values(i, 50))
        sent |= harness.step()
    assert sent == {f"r{i}" for i in range(6)}
    harness.worker.shutdown()


def check_too_many_rows(harness: Harness, message: str) -> None:
    """Those that can never fit fail their request."""
    request = harness.add("long", 200)
    harness.step({"long": 200})
    harness.sample("long", 7)
    assert harness.finish("long") == (False, None)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert message in str(request.error)
    harness.worker.shutdown()


def check_same_as_files(
    connector: str, extra: dict[str, Any], open_reader: Open, wait_s: float, tmp_path: Path
) -> None:
    """An engine gives a trainer what it gives files."""
    prompts = [prompt(seed, length) for seed, length in ((1, 40), (2, 7))]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    settings = {_FILES: {"shared_storage_path": str(tmp_path)}, connector: extra}
    for name, own in settings.items():
        transfer = {
            "kv_connector": name,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": own,
        }
        with engine(transfer, speculative_config=EXTRACTION) as llm:
            replies = [output.kv_transfer_params or {} for output in generate(llm, *prompts)]
            drain(llm)
            if name == connector:
                with open_reader(replies[0]) as reader:
                    rows = [reader.get(wait_s) for _ in prompts]
                by_id = {
                    r.request_id: (r.token_ids, r.hidden_states) for r in rows if r is not None
                }
                found[name] = [by_id[reply["hidden_states_id"]] for reply in replies]
            else:
                files = [load_hidden_states(reply["hidden_states_path"]) for reply in replies]
                found[name] = [(f["token_ids"], f["hidden_states"]) for f in files]
    for (tokens, states), (same_tokens, same_states), ids in zip(
        found[_FILES], found[connector], prompts, strict=True
    ):
        assert tokens.tolist() == same_tokens.tolist() == ids
        assert torch.equal(states, same_states) and states.shape[1] == 3


def check_kit(connector: str, extra: dict[str, Any], tmp_path: Path) -> None:
    config = {"kv_connector": connector, "kv_connector_extra_config": extra}
    options = {"speculative_config": json.loads(json.dumps(EXTRACTION))}
    case = ConnectorCase(config, ("hybrid_rows",), loads=False, options=options)
    for check in ("exact-bits", "shutdown"):
        CHECKS[check](case, "hybrid_rows", tmp_path / check)
    check_random_lives(case, "hybrid_rows", tmp_path / "random", runs=4)
