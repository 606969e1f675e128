# SPDX-License-Identifier: Apache-2.0
"""Engines over tiny checkpoints, in this process, on whatever device there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from drafter_engines import Methods
    from parity_checks import MakeEngine

    from vllm import LLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU these tests run on it, and count as GPU tests."""
    import torch

    if torch.cuda.is_available():
        for item in items:
            if "parity" in item.path.parts:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest) -> None:
    """Workers see what a test has patched, and start at once."""
    from parity_checks import LAYOUT

    if LAYOUT.devices > 1:
        request.getfixturevalue("forking")


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """`make_engine(family, dtype=..., **llm_kwargs)`; engines are shut down at the end.

    With VLLM_TEST_LAYOUT they have its workers, unless the arguments say how many there are."""
    import torch
    from parity_checks import LAYOUT, LAYOUT_SETTINGS, MOST_RANKS, MULTIPROCESSING
    from tiny_models import tiny_model

    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", MULTIPROCESSING)
    # Functions of tests go to the workers, also through the processes of replicas.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", MULTIPROCESSING)
    engines: list[LLM] = []

    def make(family: str, dtype: torch.dtype | None = None, **kwargs: Any) -> LLM:
        dtype = dtype or torch.float32
        settings: dict[str, Any] = {
            "model": str(tiny_model(family, dtype)),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": 512,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 * 2**20,
        }
        if not LAYOUT_SETTINGS.keys() & kwargs.keys():
            settings.update(LAYOUT_SETTINGS)
            if LAYOUT.tp > (most := MOST_RANKS.get(family, LAYOUT.tp)):
                pytest.skip(f"no more than {most} ranks can share {family}")
        settings.update(kwargs)
        engines.append(LLM(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Methods:
    """`methods(name)`: a drafter with layers of its own, and its target; made once."""
    from drafter_engines import make_methods

    return make_methods(tmp_path_factory.mktemp("drafters"))
