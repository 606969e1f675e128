# SPDX-License-Identifier: Apache-2.0
"""hs_connectors' Mooncake class, as its package ships it, on our engine with a stand-in store."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.offload_engines import drain, engine, prompt, run
from tests.distributed.kv_transfer.test_connector_kit import EXTRACTION
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

MODULE = "hs_connectors.mooncake_hidden_states_connector"


class Store:
    """The calls of `MooncakeDistributedStore` that the class makes; all of them share objects."""

    objects: dict[str, bytes] = {}

    def setup(self, *args: Any) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        self.objects[key] = ctypes.string_at(address, size)
        return 0

    def put(self, key: str, data: bytes) -> int:
        self.objects[key] = data
        return 0

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def get_size(self, key: str) -> int:
        return len(self.objects[key])

    def get_into(self, key: str, address: int, size: int) -> int:
        ctypes.memmove(address, self.objects[key], size)
        return size


def no_streams() -> SimpleNamespace:
    """An accelerator's module on a machine without one: everything has happened already."""
    event = SimpleNamespace(record=lambda: None)
    stream = SimpleNamespace(wait_event=lambda event: None)
    return SimpleNamespace(Stream=lambda: stream, Event=lambda: event, stream=nullcontext)


def rows_in_files(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    with engine(transfer, speculative_config=EXTRACTION) as llm:
        replies = [output.kv_transfer_params or {} for output in run(llm, *prompts)]
        drain(llm)
        return [load_hidden_states(r["hidden_states_path"])["hidden_states"] for r in replies]


def test_its_reader_gets_our_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip(MODULE)
    package, store = ModuleType("mooncake"), ModuleType("mooncake.store")
    vars(store)["MooncakeDistributedStore"] = Store
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", store)
    monkeypatch.setattr(client, "accelerator_module", no_streams)
    monkeypatch.setattr(Store, "objects", {})
    transfer = {
        "kv_connector": "MooncakeHiddenStatesConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer",
    }
    prompts = [prompt(1, 40), prompt(2, 7)]
    with engine(transfer, speculative_config=EXTRACTION) as llm:
        manifests = [output.kv_transfer_params or {} for output in run(llm, *prompts)]
        drain(llm)
    reader = client.MooncakeHiddenStatesStore(client.MooncakeStoreConfig()).setup()
    expected = rows_in_files(tmp_path, prompts)
    for manifest, ids, rows in zip(manifests, prompts, expected, strict=True):
        sample = reader.get_sample(manifest, timeout=5)
        assert sample["token_ids"].tolist() == ids
        assert torch.equal(sample["hidden_states"], rows)
