# SPDX-License-Identifier: Apache-2.0
"""Layers with state tell the connector before they touch their cache and after."""

from typing import Any

import pytest
import torch

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_models import tiny_model
from vllm.distributed.kv_transfer import kv_transfer_state


class Recorder:
    """A connector that notes the calls and whether the cache already held this step's rows."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.calls: list[tuple[str, str, bool]] = []

    def has_connector_metadata(self) -> bool:
        return True

    def _is_written(self, name: str) -> bool:
        cache = self.harness.layers[name].kv_cache
        tensors = cache if isinstance(cache, tuple) else (cache,)
        return any(bool((~t.isnan()).any()) for t in tensors)

    def wait_for_layer_load(self, name: str) -> None:
        self.calls.append(("wait", name, self._is_written(name)))

    def save_kv_layer(self, name: str, kv_cache: Any, metadata: Any) -> None:
        assert kv_cache is self.harness.layers[name].kv_cache
        assert metadata.num_tokens == 5
        self.calls.append(("save", name, self._is_written(name)))


def test_hooks_surround_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tiny_model("qwen3_5"))
    recorder = Recorder(harness)
    monkeypatch.setattr(kv_transfer_state.current_slot(), "connector", recorder)
    harness.step([Chunk(0, 0, [1, 2, 3, 4, 5])])
    names = [f"model.layers.{i}.linear_attn" for i in range(3)] + ["model.layers.3.self_attn.attn"]
    assert recorder.calls == [
        call for name in names for call in (("wait", name, False), ("save", name, True))
    ]


def test_plain_entry_calls_the_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tiny_model("llama"))
    recorder = Recorder(harness)
    name = "model.layers.0.self_attn.attn"
    layer = harness.layers[name]

    def run(*_: Any) -> torch.Tensor:
        q, kv = torch.randn(5, 4 * 32), torch.randn(5, 2 * 32)
        return layer(q.to(harness.device), kv.to(harness.device), kv.to(harness.device))

    harness.model.forward = run
    monkeypatch.setattr(kv_transfer_state.current_slot(), "connector", recorder)
    assert harness.step([Chunk(0, 0, [1, 2, 3, 4, 5])]).shape == (5, 4 * 32)
    assert recorder.calls == [("wait", name, False), ("save", name, True)]
