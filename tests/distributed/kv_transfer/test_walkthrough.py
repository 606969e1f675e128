# SPDX-License-Identifier: Apache-2.0
"""The connector of docs/adding_a_connector.md, as printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.distributed.kv_transfer.extraction_harness import cache_config, transfer_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

GUIDE = Path(__file__).parents[3] / "docs" / "adding_a_connector.md"


def test_documented_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "counting_connector.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    transfer = transfer_config("CountingConnector", role="kv_both")
    transfer.kv_connector_module_path = "counting_connector"
    config = VllmConfig(kv_transfer_config=transfer)
    scheduler, worker = (
        KVConnectorFactory.create_connector(config, role, cache_config(16, 3))
        for role in KVConnectorRole
    )
    assert supports_hma(scheduler)
    request = Request("r", [1, 2, 3], None)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = scheduler.build_connector_meta(SchedulerOutput.make_empty())
    worker.bind_connector_metadata(meta)
    worker.wait_for_save()
    assert worker.get_finished({"r"}) == (None, None)
    request.num_computed_tokens = 3
    answer = scheduler.request_finished_all_groups(request, ([1], [2, 3]))  # type: ignore[attr-defined]
    assert answer == (False, {"num_tokens": 3, "num_blocks": [1, 2]})
    del sys.modules["counting_connector"]
