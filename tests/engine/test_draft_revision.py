# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint of the hub is read at the revision that was asked for, its config and its
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.draft_models import TINY, mtp_tensors, with_mtp, write_eagle3, write_speculators_mtp
from tests.hub_cache import serve_from_cache
from tests.tiny_models import tiny_model
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import checkpoints
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.kernels.step import Progress
from vllm.v1.executor.node_agreement import agreement
from vllm.v1.spec_decode.drafter import create_drafter
from vllm.v1.spec_decode.head_drafter import MtpDrafter

NAME = "own/draft"
LATER = "later"


@pytest.fixture
def target() -> Path:
    return tiny_model("qwen3_5")


def config_of(model: str | Path, **fields: Any) -> Any:
    return EngineArgs(model=str(model), dtype="float32", **fields).create_engine_config()


def write_eagle3s(root: Path, target: Path, patch: pytest.MonkeyPatch) -> None:
    """2 drafts on main, 5 later."""
    main = write_eagle3(root / "main", target, TINY, num_tokens=2)
    later = write_eagle3(root / "later", target, TINY, num_tokens=5)
    serve_from_cache(patch, root / "hub", NAME, {"main": main, LATER: later})


def test_of_a_head_that_is_served(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_eagle3s(tmp_path, target, monkeypatch)
    assert config_of(NAME).tokens_to_verify == 3
    config = config_of(NAME, revision=LATER)
    assert config.tokens_to_verify == 6
    assert config.model_config.revision is None and config.drafter.draft.revision == LATER
    assert checkpoints(config) == [(str(target), None), (NAME, LATER)]
    with pytest.raises(VLLMValidationError, match=r"at --revision \(later\), got main"):
        config_of(NAME, revision=LATER, speculative_config={"revision": "main"})


def test_the_method_is_that_of_the_revision(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main is a model; so without the revision this would need num_speculative_tokens."""
    later = write_eagle3(tmp_path / "later", target, TINY, num_tokens=5)
    revisions = {"main": target, LATER: later}
    serve_from_cache(monkeypatch, tmp_path / "hub", NAME, revisions)
    asked = {"model": NAME, "revision": LATER}
    config = config_of(target, speculative_config=asked)
    assert config.speculative_config.method == "eagle3" and config.tokens_to_verify == 6
    hf_config = {"eagle_aux_hidden_state_layer_ids": [1]}
    beside = SpeculativeConfig(
        method="extract_hidden_states",
        num_speculative_tokens=1,
        draft_model_config={"hf_config": hf_config},
        drafter=asked,
        target_model_config=config.model_config,
    )
    assert beside.draft_settings.draft.revision == LATER


def test_of_a_draft_model(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main is a head."""
    head = write_eagle3(tmp_path / "main", None, TINY)
    serve_from_cache(monkeypatch, tmp_path / "hub", NAME, {"main": head, LATER: target})
    given = {"method": "draft_model", "model": NAME, "num_speculative_tokens": 2}
    config = config_of(target, speculative_config={**given, "revision": LATER})
    assert config.drafter.draft.revision == LATER
    assert agreement(config)["config.json of the drafter"]


def test_of_an_mtp_head(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_speculators_mtp(tmp_path / "mtp", target, mtp_tensors(TINY), num_tokens=4)
    own = with_mtp(target, tmp_path / "own", mtp_tensors(TINY))
    serve_from_cache(monkeypatch, tmp_path / "hub", NAME, {"main": own, LATER: other})
    config = config_of(target, speculative_config={"model": NAME, "revision": LATER})
    drafter = create_drafter(config, Progress.create(2, 5, torch.device("cpu")))
    assert isinstance(drafter, MtpDrafter) and config.tokens_to_verify == 5
    assert (drafter.checkpoint.model, drafter.checkpoint.revision) == (NAME, LATER)


def test_the_targets_own_head_has_the_targets_revision(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = with_mtp(target, tmp_path / "own", mtp_tensors(TINY))
    serve_from_cache(monkeypatch, tmp_path / "hub", NAME, {"main": target, LATER: own})
    given = {"method": "mtp", "model": NAME, "num_speculative_tokens": 1}
    for revision in ({}, {"revision": LATER}):
        config = config_of(NAME, revision=LATER, speculative_config={**given, **revision})
        drafter = create_drafter(config, Progress.create(2, 2, torch.device("cpu")))
        assert isinstance(drafter, MtpDrafter) and drafter.checkpoint.revision == LATER
    with pytest.raises(VLLMValidationError, match=r"must be absent or --revision \(later\) with"):
        config_of(NAME, revision=LATER, speculative_config={**given, "revision": "main"})
