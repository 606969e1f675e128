# SPDX-License-Identifier: Apache-2.0
"""`vllm bench acceptance`: chains against a reference, hand-made rounds, files, errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dflash_models import Block, DFlashReference, dflash_tensors, write_dflash
from tests.draft_models import (
    TINY,
    Eagle3Reference,
    MtpReference,
    Shape,
    eagle3_tensors,
    gen,
    mtp_tensors,
    rms,
    with_mtp,
    write_eagle3,
    write_speculators_mtp,
)
from tests.tiny_models import tiny_model
from vllm.benchmarks.acceptance import HiddenStateDataset, RoundCounts, count_rounds, replies
from vllm.benchmarks.block_drafts import BlockDrafts
from vllm.benchmarks.draft_chains import DraftChains
from vllm.benchmarks.mtp_chains import MtpChains
from vllm.benchmarks.target_tensors import TargetTensors
from vllm.config import ModelConfig
from vllm.config.draft_methods.dflash import DFlashSettings
from vllm.config.draft_methods.eagle3 import Eagle3Settings
from vllm.entrypoints.cli.main import main
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_storage import RowFormat

FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
IDS = [(37 * i * i + 11 * i + 5) % 256 for i in range(21)]
STREAMS = gen("streams", [len(IDS), 4, TINY.hidden], 2.0).float()


@pytest.fixture(scope="module")
def target() -> Path:
    return tiny_model("llama")


def chains_of(target: Path, path: Path) -> DraftChains:
    settings = Eagle3Settings(model=str(path)).resolved(ModelConfig(model=str(target)), None)
    return DraftChains(settings.draft.hf_config, load_file(path / "model.safetensors"), len(IDS))


@pytest.mark.parametrize(
    ("flags", "layers", "window"),
    [
        (FLAGS, 1, None),
        ({}, 2, None),
        ({"norm_before_residual": True, "fc_norm": True}, 1, 6),
        (FLAGS, 1, 2),
    ],
)
def test_chains_are_the_references(
    flags: dict[str, bool], layers: int, window: int | None, target: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {}
    if window is not None:
        fields = {"layer_types": ["sliding_attention"] * layers, "sliding_window": window}
    tensors = eagle3_tensors(TINY, flags, layers)
    path = write_eagle3(tmp_path, target, TINY, flags, layers=layers, tensors=tensors, **fields)
    found = chains_of(target, path).drafts(STREAMS[:-1, :3], torch.tensor(IDS), 4)
    reference = Eagle3Reference(tensors, TINY, flags, window=window)
    streams = STREAMS[:-1, :3].double()
    fused = reference.fuse(streams[:, 0], list(streams.unbind(1)))
    following = torch.tensor(IDS[1:])
    expected = reference.chains(fused, following, 4, range(1, len(IDS)))
    assert found.tolist() == [expected[n][0] for n in range(1, len(IDS))]


@pytest.mark.parametrize("speculators", [False, True])
def test_the_targets_own_head_is_the_references(speculators: bool, tmp_path: Path) -> None:
    tensors = mtp_tensors(TINY)
    path = with_mtp(tiny_model("qwen3_5"), tmp_path / "mtp", tensors)
    head = write_speculators_mtp(tmp_path / "head", path, tensors) if speculators else path
    text, shared = ModelConfig(model=str(path)).hf_text_config, TargetTensors(str(path))
    chains = MtpChains(text, load_file(head / "model.safetensors"), shared, len(IDS))
    found = chains.drafts(STREAMS[:-1, 3:], torch.tensor(IDS), 4)
    weights = [shared.embedding.double(), shared.output_head.double()]
    reference = MtpReference(tensors, TINY, *weights, rotary_dim=8, theta=1e7)
    hidden = rms(STREAMS[:-1, 3].double(), shared.final_norm.double(), one_plus=True)
    expected = reference.chains(hidden, torch.tensor(IDS[1:]), 4, range(1, len(IDS)))
    assert found.tolist() == [expected[n][0] for n in range(1, len(IDS))]


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (Block(size=5, windows=(None, 6)), TINY),
        (Block(size=4, windows=(6,), non_causal=True, from_anchor=True), TINY),
        (Block(size=4), replace(TINY, draft_vocab=TINY.vocab)),
    ],
)
def test_blocks_are_the_references(
    block: Block, shape: Shape, target: Path, tmp_path: Path
) -> None:
    tensors, depth = dflash_tensors(shape, block), block.size - block.first
    path = write_dflash(tmp_path, target, shape, block)
    settings = DFlashSettings(model=str(path)).resolved(ModelConfig(model=str(target)), None)
    shared = TargetTensors(str(target))
    blocks = BlockDrafts(
        settings.draft.hf_config, load_file(path / "model.safetensors"), shared, len(IDS)
    )
    found = blocks.drafts(STREAMS[:-1, :3], torch.tensor(IDS), depth)
    weights = [shared.embedding.double(), shared.output_head.double()]
    reference = DFlashReference(tensors, shape, block, *weights)
    streams = STREAMS[:-1, :3].double()
    fused = reference.fuse(streams[:, 0], list(streams.unbind(1)))
    expected = reference.chains(fused, torch.tensor(IDS[1:]), depth, range(1, len(IDS)))
    assert found.tolist() == [expected[n][0] for n in range(1, len(IDS))]


def test_a_drafter_that_reads_no_hidden_states(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, tiny_model("qwen3_5"), write_dataset(tmp_path / "d", [1, 2, 3, 4])) == 1
    assert "drafts by draft_model, which reads no hidden states" in capsys.readouterr().err


def test_rounds_of_a_reply() -> None:
    """Prompt of two; the round after token 2 drafts two right and one wrong, and so on."""
    ids = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    nothing = [99, 99, 99]
    drafts = [nothing, [3, 4, 99], nothing, nothing, [6, 99, 99], nothing, [8, 9, 9], nothing]
    counts = RoundCounts(3)
    count_rounds(counts, ids, drafts, range(2, 9))
    # From 2: two right, 5 follows. From 5: one, 7 follows. From 7 there is room for one, 8.
    assert (counts.drafts, counts.draft_tokens) == (3, 3 + 3 + 1)
    assert counts.per_position == [3, 1, 0]
    assert counts.length == pytest.approx(7 / 3)


def test_replies_are_runs_of_ones() -> None:
    assert list(replies([0, 0, 1, 1, 0, 1])) == [(2, 4), (5, 6)]
    assert list(replies([1, 1, 1])) == [(1, 3)], "the first token follows nothing"
    assert list(replies([1, 0, 0])) == list(replies([0, 0])) == []


def write_dataset(path: Path, layers: list[int] | None) -> Path:
    mask = [0] * 4 + [1] * (len(IDS) - 4)
    columns = {"input_ids": [IDS], "loss_mask": [mask], "seq_len": [len(IDS)]}
    datasets.Dataset.from_dict(columns).save_to_disk(path)
    (path / "hidden_states").mkdir()
    tensors = {"hidden_states": STREAMS, "token_ids": torch.tensor(IDS)}
    save_file(tensors, path / "hidden_states" / "hs_0.safetensors")
    (path / "extraction.json").write_text(json.dumps({"layers": layers}))
    return path


def run(target: Path, drafter: Path, dataset: Path, *flags: str) -> int:
    paths = ["--model", str(target), "--drafter", str(drafter), "--dataset", str(dataset)]
    return main(["bench", "acceptance", *paths, *flags])


def test_from_files_to_a_result(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = write_eagle3(tmp_path / "drafter", target, TINY, FLAGS, num_tokens=2)
    dataset = write_dataset(tmp_path / "dataset", [1, 2, 3, 4])
    result_file, picture = tmp_path / "result.json", tmp_path / "p.png"
    flags = ["--output-json", str(result_file), "--plot", str(picture)]
    assert run(target, drafter, dataset, *flags) == 0
    counts = RoundCounts(2)
    drafts = chains_of(target, drafter).drafts(STREAMS[:-1, :3], torch.tensor(IDS), 2)
    count_rounds(counts, IDS, drafts.tolist(), range(4, len(IDS)))
    result = json.loads(result_file.read_text())
    assert result["spec_decode_num_drafts"] == counts.drafts > 10
    assert result["spec_decode_per_position_acceptance_rates"] == counts.rates
    assert f"Mean acceptance length: {counts.length:.4f}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_dataset_of_speculators_has_the_layers_that_a_head_is_trained_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands state none; the head's come first, then the target's output."""
    drafter = write_eagle3(tmp_path / "drafter", target, TINY, FLAGS, num_tokens=2)
    dataset = write_dataset(tmp_path / "dataset", [1, 2, 3, 4])
    assert run(target, drafter, dataset) == 0
    stated = capsys.readouterr().out
    (dataset / "extraction.json").unlink()
    rows = datasets.load_from_disk(str(dataset))
    rows.with_format("torch").save_to_disk(tmp_path / "theirs")  # as theirs is
    (dataset / "hidden_states").rename(tmp_path / "theirs" / "hidden_states")
    assert run(target, drafter, tmp_path / "theirs") == 0
    assert capsys.readouterr().out == stated


def test_files_say_their_layers_where_the_dataset_does_not(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the engine's do: more columns than those that the head is trained on."""
    drafter = write_eagle3(tmp_path / "drafter", target, TINY, FLAGS, num_tokens=2)
    assert run(target, drafter, write_dataset(tmp_path / "dataset", [1, 2, 3, 4])) == 0
    stated = capsys.readouterr().out
    dataset = write_dataset(tmp_path / "theirs", None)
    (dataset / "extraction.json").unlink()
    first = torch.zeros_like(STREAMS[:, :1])
    damaged(dataset, torch.cat([first, STREAMS], 1), [0, 1, 2, 3, 4])
    assert run(target, drafter, dataset) == 0
    assert capsys.readouterr().out == stated


@pytest.mark.parametrize("stated", [True, False])
def test_files_of_other_layers_of_the_same_number(
    stated: bool, refusal: Refusal, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "dataset", [1, 2, 3, 4])
    damaged(dataset, STREAMS, [0, 1, 2, 4])
    if stated:
        said = "holds those of layers [0, 1, 2, 4], not [1, 2, 3, 4], as the dataset says"
    else:
        (dataset / "extraction.json").unlink()
        said = "reads hidden states [1, 2, 3], but"
    assert said in refusal(dataset)


def test_rows_in_eight_bits(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "dataset", [1, 2, 3, 4])
    row_format = RowFormat(4, TINY.hidden, torch.float32, "fp8_e4m3")
    stored = row_format.store(STREAMS)
    tensors = {**stored.tensors, "token_ids": torch.tensor(IDS)}
    save_file(tensors, path / "hidden_states" / "hs_0.safetensors", row_format.metadata)
    [sample] = HiddenStateDataset.open(path, None, []).samples()
    assert torch.equal(sample.hidden_states, row_format.restore(stored))
    assert sample.hidden_states.dtype == torch.float32
    assert 0 < (sample.hidden_states - STREAMS).norm() < 0.03 * STREAMS.norm()


Refusal = Callable[[Path], str]


@pytest.fixture
def refusal(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What is said of a dataset that a drafter cannot be judged by."""

    def refusal(dataset: Path) -> str:
        assert run(target, write_eagle3(tmp_path / "drafter", target, TINY, FLAGS), dataset) == 1
        return capsys.readouterr().err

    return refusal


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0, 1, 2, 4], r"reads hidden states \[1, 2, 3\], but .* has those of \[0, 1, 2, 4\]"),
        (None, "does not state its layers; extract it with --layers"),
    ],
)
def test_datasets_of_other_layers(
    layers: list[int] | None, message: str, refusal: Refusal, tmp_path: Path
) -> None:
    assert re.search(message, refusal(write_dataset(tmp_path / "dataset", layers)))


def damaged(path: Path, states: torch.Tensor, layers: list[int] | None = None) -> None:
    """Other rows in a sample's file, which may say of which layers."""
    tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(IDS)}
    metadata = None if layers is None else {"layer_ids": json.dumps(layers)}
    save_file(tensors, path / "hidden_states" / "hs_0.safetensors", metadata)


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: damaged(path, STREAMS[..., :32]), "has hidden states of 32 and token"),
    (
        lambda path: damaged(path, STREAMS[:9]),
        r"holds \[9, 4, 64\] numbers, not those of 21 tokens",
    ),
    (lambda path: damaged(path, STREAMS[:, :3]), r"after \[1, 2, 3, 4\] layers, as the dataset"),
    (lambda path: cut(path / "hidden_states" / "hs_0.safetensors"), "hs_0.safetensors cannot be"),
    (lambda path: cut(next(path.glob("*.arrow"))), "dataset cannot be read"),
    (lambda path: (path / "extraction.json").write_text("{}"), "does not state its layers"),
    (lambda path: cut(path / "extraction.json"), "dataset cannot be read"),
    (lambda path: shutil.rmtree(path / "hidden_states"), "has no hidden_states: make them with"),
    (
        lambda path: (path / "hidden_states" / "hs_0.safetensors").unlink(),
        "hs_0.safetensors: make it, or read only the samples before it with --num-samples",
    ),
]


def test_a_dataset_of_speculators_for_another_head(refusal: Refusal, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", None)
    (dataset / "extraction.json").unlink()
    damaged(dataset, STREAMS[:, :3])
    said = "after [1, 2, 3, 4] layers, on which --drafter is trained"
    assert said in refusal(dataset)


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_datasets(
    damage: Callable[[Path], object], message: str, refusal: Refusal, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "dataset", [1, 2, 3, 4])
    damage(dataset)
    said = refusal(dataset)
    assert re.search(message, said) and "Traceback" not in said


def test_a_dataset_of_another_vocabulary(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "IDS", [*IDS[:-1], 5000])
    said = refusal(write_dataset(tmp_path / "dataset", [1, 2, 3, 4]))
    assert "and token 5000; those of --model" in said


def test_a_directory_that_is_none(
    refusal: Refusal, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no hidden_states: make them with" in refusal(tmp_path)
    assert "is no directory" in refusal(tmp_path / "absent")
    assert main(["bench", "acceptance", "--model", str(target)]) == 1
    assert "--drafter must be given" in capsys.readouterr().err


def test_a_checkpoint_without_embedding(target: Path, tmp_path: Path) -> None:
    tensors = eagle3_tensors(TINY, FLAGS)
    del tensors["embed_tokens.weight"]
    path = write_eagle3(tmp_path, target, TINY, FLAGS, tensors=tensors)
    with pytest.raises(VLLMValidationError, match="has no embed_tokens.weight"):
        chains_of(target, path)
