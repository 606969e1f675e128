# SPDX-License-Identifier: Apache-2.0
"""What the author of a connector gets wrong ends in an error that names it and says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer import toy_connectors
from tests.distributed.kv_transfer.extraction_harness import cache_config
from tests.distributed.kv_transfer.toy_connectors import HybridConnector, plain
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.exceptions import VLLMValidationError
from vllm.testing.connectors import ConnectorCase, ContractViolation
from vllm.testing.connectors.engine import SimulatedEngine

OWN = {
    "kv_connector": "HybridConnector",
    "kv_connector_module_path": toy_connectors.__name__,
    "kv_role": "kv_both",
}
SEVERAL = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OWN]}}

ANSWERS: list[tuple[str, object, str]] = [
    ("get_num_new_matched_tokens", 0, "tokens to load.*whether that runs beside"),
    ("get_num_new_matched_tokens", None, "tokens to load"),
    ("get_num_new_matched_tokens", (16.0, False), "tokens to load"),
    ("build_connector_meta", None, "a KVConnectorMetadata"),
    ("build_connector_meta", {}, "a KVConnectorMetadata"),
    ("request_finished_all_groups", None, "whether it keeps the blocks"),
    ("request_finished_all_groups", False, "whether it keeps the blocks"),
    ("request_finished_all_groups", (False, "sent"), "a dictionary for the client"),
    ("get_finished", None, "two sets of request ids"),
    ("get_finished", ("r1", None), "two sets of request ids"),
    ("get_blocks_with_load_errors", None, "pairs"),
    ("get_blocks_with_load_errors", {3}, "pairs"),
    ("get_block_ids_with_load_errors", {(0, 3)}, "block ids"),
    ("take_failed_requests", None, "from request id to reason"),
    ("get_kv_connector_stats", {"sent": 1}, "KVConnectorStats"),
    ("build_connector_worker_meta", {"sent": 1}, "KVConnectorWorkerMetadata"),
]


@pytest.mark.parametrize("config", [OWN, SEVERAL], ids=["alone", "child"])
@pytest.mark.parametrize(("method", "answer", "instead"), ANSWERS)
def test_answers(
    method: str,
    answer: object,
    instead: str,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HybridConnector, method, lambda *_: answer)
    engine = SimulatedEngine(ConnectorCase(config), "hybrid", tmp_path)
    returned = re.escape(f"HybridConnector.{method} returned {answer!r}; ")
    with pytest.raises(ContractViolation, match=f"^raised.*{returned}.*{instead}"):
        engine.generate([1, 2, 3])
    engine.shutdown()


def made(monkeypatch: pytest.MonkeyPatch, **members: object) -> KVConnectorBase_V1:
    wrong = type("Wrong", (HybridConnector,), members)
    monkeypatch.setattr(toy_connectors, "Wrong", wrong, raising=False)
    config = VllmConfig(kv_transfer_config=plain("Wrong"))
    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())


@pytest.mark.parametrize(
    ("member", "value", "says"),
    [
        ("takes_arena", lambda self: False, "takes_arena is a property: write @property"),
        ("has_pending_push_work", property(lambda self: False), "is a method: take @property away"),
        ("acts_on_every_layer", lambda self, extra: False, "write @classmethod"),
        ("get_finished", lambda self: (None, None), r"called with \(self, finished_req_ids\)"),
        ("acts_on_every_layer", classmethod(lambda cls: False), r"with \(cls, extra_config\)"),
        ("wait_for_save", KVConnectorBase_V1.wait_for_save, "lacks wait_for_save: every connector"),
        ("__init__", lambda self, *_: None, r"does not call super\(\).__init__\(vllm_config"),
    ],
)
def test_members(member: str, value: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VLLMValidationError, match=f"Wrong.*{says}"):
        made(monkeypatch, **{member: value})


def test_what_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names, further arguments with defaults, and a plain attribute for a property."""
    made(
        monkeypatch,
        takes_arena=True,
        get_finished=lambda self, ended, more=None: (None, None),
        start_load_kv=lambda self, *args, **kwargs: None,
        acts_on_every_layer=classmethod(lambda cls, *args: False),
    )


@pytest.mark.parametrize(("kind", "beside"), [("attention", False), ("hybrid", True)])
def test_the_last_token_must_be_left(
    kind: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed for its logits: again, after a load beside the steps, which a recurrent state
    that has seen it cannot do."""
    monkeypatch.setattr(HybridConnector, "get_num_new_matched_tokens", lambda *_: (3, beside))
    engine = SimulatedEngine(ConnectorCase(OWN), kind, tmp_path)
    with pytest.raises(ContractViolation, match="matched 3 tokens .* must compute its last"):
        engine.generate([1, 2, 3])
    engine.shutdown()
