# SPDX-License-Identifier: Apache-2.0
"""Files and streams of hidden states say of which layers their columns are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.distributed.kv_transfer.extraction_harness import (
    Harness,
    cache_config,
    extraction_config,
    row_values,
    transfer_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.hidden_states_storage import read_hidden_states, stored_layer_ids
from vllm.hidden_states_stream import RemoteRows


def harness(connector: str, layers: list[int], **extra: Any) -> Harness:
    return Harness(extraction_config(transfer_config(connector, **extra), layers), cache_config())


@pytest.mark.parametrize("storage", ["auto", "fp8_e4m3"])
def test_of_a_request(tmp_path: Path, storage: str) -> None:
    """In the order of the columns, however they were given."""
    extra = {"shared_storage_path": str(tmp_path), "storage_dtype": storage}
    run = harness("ExampleHiddenStatesConnector", [4, 0, 2], **extra)
    path = run.run_to_end("r", 20)
    run.worker.shutdown()
    assert stored_layer_ids(path) == [0, 2, 4]
    rows = read_hidden_states(path)
    assert rows.keys() == {"hidden_states", "token_ids"}
    assert torch.allclose(rows["hidden_states"], row_values(0, 20), rtol=1 / 16)


def test_of_a_captured_request(tmp_path: Path) -> None:
    extra = {"shared_storage_path": str(tmp_path), "capture_rate": 1.0}
    run = harness("LiveCaptureConnector", [4, 0, 2], **extra)
    run.add("r", 20, {"capture": True})
    run.step({"r": 20})
    run.sample("r", 7)
    run.finish("r")
    run.step()
    run.worker.shutdown()
    [path] = (tmp_path / "hidden_states").iterdir()
    assert stored_layer_ids(path) == [0, 2, 4]
    assert json.loads((tmp_path / "capture.json").read_text())["layers"] == [0, 2, 4]


def test_of_a_stream() -> None:
    extra = {"host": "127.0.0.1", "port": 0, "stream_bytes": 2**16}
    run = harness("StreamHiddenStatesConnector", [4, 0, 2], **extra)
    told = run.worker.get_handshake_metadata()
    run.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
    try:
        address = run.scheduler._place()["hidden_states_stream"]
        with RemoteRows(address, expect={"layer_ids": [0, 2, 4]}) as reader:
            assert reader.about["layer_ids"] == [0, 2, 4]
    finally:
        run.worker.shutdown()


class OwnEncoding(ExampleHiddenStatesConnector):
    @staticmethod
    def _write_tensors(
        tensors: dict[str, Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        event.synchronize()
        save_file(tensors, filename)


def test_an_encoding_of_its_own_says_what_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = transfer_config("OwnEncoding", shared_storage_path=str(tmp_path))
    transfer.kv_connector_module_path = __name__
    run = Harness(extraction_config(transfer), cache_config())
    path = run.run_to_end("r", 20)
    run.worker.shutdown()
    assert stored_layer_ids(path) is None
