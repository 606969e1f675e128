# SPDX-License-Identifier: Apache-2.0
"""Draft heads against numbers written down and an fp64 reference, over their own paged caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.draft_models import (
    Eagle3Reference,
    HeadReference,
    MtpReference,
    Shape,
    eagle3_tensors,
    gen,
    mtp_tensors,
    with_mtp,
    write_eagle3,
    write_speculators_mtp,
)
from tests.model_executor.harness import BLOCKS_PER_SEQ, Chunk, Harness, get_model, make_config
from tests.tiny_models import make_tiny
from vllm.config.draft_methods.eagle3 import Eagle3Settings
from vllm.config.draft_methods.mtp import MtpSettings
from vllm.exceptions import VLLMValidationError
from vllm.kernels.step import Progress
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.state_layers import collect_layers
from vllm.v1.spec_decode.head_drafter import Eagle3Drafter, HeadDrafter, MtpDrafter

#: the numbers' shapes; their map of ids is not one to one, so it comes without its inverse
GOLDEN = Shape(modulus=3)
TOKENS = [(37 * i * i + 11 * i + 5) % 256 for i in range(13)]
NBR = {"norm_before_residual": True}
VARIANTS: dict[str, tuple[dict[str, bool], list[int], list[float], list[float]]] = {
    "A": (
        NBR,
        [135, 135, 138, 90],
        [-1.273010, -1.626631, -0.656677, -1.078756],
        [4.746770, 4.831933, 4.902237, 4.858136],
    ),
    "B": (
        {},
        [135, 135, 138, 135],
        [-0.867205, -1.228147, -0.465652, -1.271826],
        [4.749024, 4.793628, 4.851927, 4.837340],
    ),
    "C": (
        NBR | {"norm_before_fc": True, "norm_output": True},
        [135, 135, 138, 90],
        [-1.454384, -1.680670, -0.724878, -0.989811],
        [4.742066, 4.845031, 4.952445, 4.915978],
    ),
    "D": (
        NBR | {"fc_norm": True},
        [135, 138, 138, 90],
        [-1.039914, -1.950081, -0.332458, -1.011735],
        [4.750488, 4.905097, 4.932936, 4.893972],
    ),
}
STREAMS = [torch.stack([gen(f"aux{t}", [3, 64], 2.0)[i] for t in range(12)]) for i in range(3)]


class HeadHarness(Harness):
    """A head over hand-made caches; `rows` are the hidden states of the next step."""

    def __init__(self, drafter: HeadDrafter[Any], target: nn.Module) -> None:
        self.config = drafter.vllm_config
        self.head = drafter.build_model(target)
        drafter.load_weights()
        self.device, self.num_seqs = torch.device("cpu"), 2
        self.layers = collect_layers(self.config, self.head)
        for layer in self.layers.values():
            layer.kv_cache = self._new_cache(layer)
        self.model = lambda ids, positions: self.head(ids, positions, self.rows)  # type: ignore[assignment]

    def chain(self, fused: Tensor, chunk: int, count: int) -> tuple[list[int], list[Tensor]]:
        """As `HeadReference.chain`; the first rows run in chunks."""
        following, drafts, kept = TOKENS[1:], [], []
        for start in range(0, len(fused), chunk):
            self.rows = fused[start : start + chunk]
            ids = following[start : start + chunk]
            normed, hidden = self.step([Chunk(1, start, ids)])
        for j in range(count):
            kept.append(self.head.logits(normed[-1:])[0])
            drafts.append(int(self.head.target_ids(kept[-1].argmax())))
            self.rows = hidden[-1:]
            normed, hidden = self.step([Chunk(1, len(fused) + j, drafts[-1:])])
        return drafts, kept


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 256, "head_dim": 16, "intermediate_size": 128}
    ends = {"eos_token_id": 2, "pad_token_id": 3}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    path = make_tiny(
        "qwen3_5", tmp_path_factory.mktemp("target"), rope_parameters=rope, **sizes, **ends
    )
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensors[name] = gen("embed", tensor.shape, 1.0).float()
        if name == "lm_head.weight":
            tensors[name] = gen("lm_head", tensor.shape, 0.2).float()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def eagle3(target: Path, draft: Path, **fields: Any) -> HeadHarness:
    config = make_config(target)
    settings = Eagle3Settings(model=str(draft), **fields).resolved(config.model_config, None)
    drafter = Eagle3Drafter(config, settings, Progress.create(2, 4, torch.device("cpu")))
    return HeadHarness(drafter, get_model(config))


def mtp(target: Path, **fields: Any) -> HeadHarness:
    config = make_config(target)
    settings = MtpSettings(**fields).resolved(config.model_config, None)
    drafter = MtpDrafter(config, settings, Progress.create(2, 4, torch.device("cpu")))
    return HeadHarness(drafter, get_model(config))


def mtp_reference(dtype: torch.dtype = torch.float64) -> MtpReference:
    embed, head = gen("embed", [256, 64], 1.0), gen("lm_head", [256, 64], 0.2)
    return MtpReference(mtp_tensors(GOLDEN), GOLDEN, embed.to(dtype), head.to(dtype), 8, 1e4)


def assert_equal_chains(
    harness: HeadHarness, fused: Tensor, reference: HeadReference, exact: Tensor, chunk: int
) -> None:
    count = 4
    drafts, logits = harness.chain(fused, chunk, count)
    expected, exact_logits = reference.chain(exact, torch.tensor(TOKENS[1:]), count)
    assert drafts == expected
    for found, right in zip(logits, exact_logits, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_eagle3_reference_gives_the_known_numbers(variant: str) -> None:
    flags, drafts, first, sums = VARIANTS[variant]
    reference = Eagle3Reference(eagle3_tensors(GOLDEN, flags), GOLDEN, flags)
    fused = reference.fuse(STREAMS[0], STREAMS)
    found, logits = reference.chain(fused, torch.tensor(TOKENS[1:]), 4)
    assert found == drafts
    assert logits[0][:4].tolist() == pytest.approx(first, abs=2e-6)
    assert [float(x.logsumexp(-1)) for x in logits] == pytest.approx(sums, abs=2e-6)


def test_the_mtp_reference_gives_the_known_numbers() -> None:
    hidden = gen("mtp_hidden", [12, 64], 2.0)
    drafts, logits = mtp_reference().chain(hidden, torch.tensor(TOKENS[1:]), 3)
    assert drafts == [123, 194, 129]
    sums = [float(x.logsumexp(-1)) for x in logits]
    assert sums == pytest.approx([5.886035, 5.983539, 6.035424], abs=2e-6)
    assert logits[2][:4].tolist() == pytest.approx(
        [-0.665349, -0.108991, -1.471221, 0.867904], abs=2e-6
    )


@pytest.mark.parametrize("chunk", [12, 5])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_eagle3(variant: str, chunk: int, target_path: Path, tmp_path: Path) -> None:
    flags = VARIANTS[variant][0]
    draft = write_eagle3(tmp_path, target_path, GOLDEN, flags)
    harness = eagle3(target_path, draft)
    reference = Eagle3Reference(eagle3_tensors(GOLDEN, flags), GOLDEN, flags)
    fused = harness.head.fuse(STREAMS[0].float(), [x.float() for x in STREAMS])
    exact = reference.fuse(STREAMS[0], STREAMS)
    torch.testing.assert_close(fused.double(), exact, rtol=0, atol=2e-5)
    assert_equal_chains(harness, fused, reference, exact, chunk)


@torch.inference_mode()
def test_eagle3_of_several_layers(target_path: Path, tmp_path: Path) -> None:
    draft = write_eagle3(tmp_path, target_path, GOLDEN, NBR, layers=2)
    reference = Eagle3Reference(eagle3_tensors(GOLDEN, NBR, 2), GOLDEN, NBR)
    exact = reference.fuse(STREAMS[0], STREAMS)
    assert_equal_chains(eagle3(target_path, draft), exact.float(), reference, exact, 5)


@pytest.mark.parametrize("chunk", [12, 5])
@torch.inference_mode()
def test_mtp(chunk: int, target_path: Path, tmp_path: Path) -> None:
    harness = mtp(with_mtp(target_path, tmp_path / "target", mtp_tensors(GOLDEN)))
    hidden = gen("mtp_hidden", [12, 64], 2.0)
    assert_equal_chains(harness, hidden.float(), mtp_reference(), hidden, chunk)


@torch.inference_mode()
def test_mtp_as_speculators_stores_it(target_path: Path, tmp_path: Path) -> None:
    draft = write_speculators_mtp(tmp_path, target_path, mtp_tensors(GOLDEN), num_tokens=2)
    harness = mtp(target_path, model=str(draft))
    hidden = gen("mtp_hidden", [12, 64], 2.0)
    assert_equal_chains(harness, hidden.float(), mtp_reference(), hidden, 12)


# ---- steps after which nothing is drafted --------------------------------------------------------


def _kept(harness: HeadHarness, fused: Tensor, chunk: int) -> dict[str, Tensor]:
    """The caches, NaN before, after steps over the tokens and what was fused of them."""
    for layer in harness.layers.values():
        layer.kv_cache.fill_(torch.nan)
    for start in range(0, len(fused), chunk):
        harness.rows = fused[start : start + chunk]
        harness.step([Chunk(1, start, TOKENS[1 + start :][: len(harness.rows)])])
    return {name: layer.kv_cache.clone() for name, layer in harness.layers.items()}


@pytest.mark.parametrize("chunk", [12, 5, 1])
@pytest.mark.parametrize("name", ["mtp", "eagle3 of 1", "eagle3 of 3"])
def test_state_without_drafts_is_that_of_the_whole_head(
    name: str, chunk: int, target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, and only layers before the last one attend."""
    if name == "mtp":
        harness = mtp(with_mtp(target_path, tmp_path / "target", mtp_tensors(GOLDEN)))
    else:
        layers = int(name[-1])
        draft = write_eagle3(tmp_path, target_path, GOLDEN, NBR, layers=layers)
        harness = eagle3(target_path, draft)
    fused = gen("kept", [12, 64], 2.0).float()
    whole = _kept(harness, fused, chunk)
    attended: list[str] = []
    attend = Attention._attend

    def watched(layer: Attention, *args: Any) -> None:
        attended.append(layer.layer_name)
        attend(layer, *args)

    monkeypatch.setattr(Attention, "_attend", watched)
    head = harness.head
    harness.model = lambda ids, positions: head.keep(ids, positions, harness.rows)  # type: ignore[assignment]
    kept = _kept(harness, fused, chunk)
    for layer, cache in whole.items():
        assert torch.equal(kept[layer].view(torch.int32), cache.view(torch.int32))
        assert not cache[1 + BLOCKS_PER_SEQ].isnan().all()
    assert set(attended) == set(list(whole)[:-1])


# ---- what is shared, and what is refused ---------------------------------------------------------


def test_an_equal_embedding_is_shared(target_path: Path, tmp_path: Path) -> None:
    tensors = eagle3_tensors(GOLDEN, NBR)
    own = eagle3(target_path, write_eagle3(tmp_path / "a", target_path, GOLDEN, NBR))
    assert "embed_tokens.weight" in dict(own.head.named_parameters())
    tensors["embed_tokens.weight"] = gen("embed", [256, 64], 1.0)
    path = write_eagle3(tmp_path / "b", target_path, GOLDEN, NBR, tensors=tensors)
    shared = eagle3(target_path, path)
    assert "embed_tokens.weight" not in dict(shared.head.named_parameters())
    del tensors["embed_tokens.weight"]
    path = write_eagle3(tmp_path / "c", target_path, GOLDEN, NBR, tensors=tensors)
    assert "embed_tokens.weight" not in dict(eagle3(target_path, path).head.named_parameters())


def test_a_full_vocabulary_needs_no_map(target_path: Path, tmp_path: Path) -> None:
    shape = Shape(draft_vocab=256)
    tensors = eagle3_tensors(shape, NBR)
    del tensors["lm_head.weight"]
    path = write_eagle3(tmp_path, target_path, shape, NBR, tensors=tensors)
    harness = eagle3(target_path, path)
    assert torch.equal(harness.head.target_ids(torch.arange(5)), torch.arange(5))
    rows = torch.ones(1, 64)
    head = gen("lm_head", [256, 64], 0.2).float()
    torch.testing.assert_close(harness.head.logits(rows), rows @ head.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "missing: d2t"),
        ({"d2t": torch.full((96,), 250)}, "d2t leads out of the target's 256"),
        ({"t2d": torch.ones(256, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ({"fc.weight": torch.zeros(64, 128)}, "mis-shaped: fc.weight"),
        ({"norm.weight": None}, "missing: norm.weight"),
        ({"surplus": torch.zeros(1)}, "surplus: surplus"),
    ],
)
def test_what_does_not_fit(
    change: dict[str, Tensor | None], message: str, target_path: Path, tmp_path: Path
) -> None:
    tensors = eagle3_tensors(GOLDEN, NBR) | {k: v for k, v in change.items() if v is not None}
    tensors = {k: v for k, v in tensors.items() if k not in change or change[k] is not None}
    path = write_eagle3(tmp_path, target_path, GOLDEN, NBR, tensors=tensors)
    with pytest.raises(WeightsError, match=message):
        eagle3(target_path, path)


def test_mtp_checks_the_checkpoint_whatever_number_is_asked_for(
    target_path: Path, tmp_path: Path
) -> None:
    other = write_eagle3(tmp_path, target_path, GOLDEN)
    with pytest.raises(VLLMValidationError, match="speculators checkpoint of type mtp with"):
        mtp(target_path, model=str(other), num_speculative_tokens=2)


def test_a_target_without_head(target_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match="needs a checkpoint with a head of one layer"):
        mtp(target_path)


def test_a_head_without_tensors(target_path: Path, tmp_path: Path) -> None:
    path = with_mtp(target_path, tmp_path, {})
    with pytest.raises(WeightsError, match=r"the checkpoint has no mtp\.\* tensors"):
        mtp(path)


def proposing(num_tokens: int) -> dict[str, Any]:
    return {"proposal_methods": [{"speculative_tokens": num_tokens}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transformer_layer_config": {"model_type": "gemma3_text"}}, "draft layers of type gemma"),
        ({"transformer_layer_config": {"head_dim": None}}, "states no head_dim"),
        (
            {"transformer_layer_config": {"vocab_size": 300}},
            "vocabulary of 300; the target has 256",
        ),
        ({"target_hidden_size": 128}, "reads hidden states of 128; the target's have 64"),
        ({"norm_before_fc": True, "fc_norm": True}, "sets both norm_before_fc and fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "must be distinct numbers from 0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, "reads hidden states .1, 5."),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"reads hidden states \[2, 2, 1\]"),
        (
            {"trained_on": {"layers": [0, 2, 3, 4]}},
            r"trained on hidden states \[0, 2, 3, 4\].*would get \[1, 2, 3, 4\]",
        ),
        ({"trained_on": {"layers": [1, 2, 3, 8]}}, r"would get \[1, 2, 3, 4\]"),
        ({"trained_on": {"layers": None}}, "must have the dataset's layer ids"),
        ({"speculators_model_type": "dflash2"}, "of type dflash2, which is not supported"),
        ({"speculators_model_type": None}, "must be a speculators checkpoint of type eagle3"),
        ({"speculators_config": {}}, "lacks speculators_config.proposal_methods"),
        ({"speculators_config": {"proposal_methods": {}}}, "lacks speculators_config.proposal_me"),
        ({"speculators_config": {"proposal_methods": ["greedy"]}}, "a number from 1 on"),
        ({"speculators_config": proposing(0)}, "a number from 1 on"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, "must be distinct numbers from 0"),
        ({"draft_vocab_size": None}, "has draft_vocab_size None, which must be 1 to 256"),
        ({"draft_vocab_size": 32000}, "has draft_vocab_size 32000, which must be 1 to 256"),
        ({"transformer_layer_config": {"layer_types": ["full_attention"] * 2}}, "cannot be used"),
        (
            {
                "transformer_layer_config": {
                    "layer_types": ["sliding_attention"],
                    "sliding_window": 0,
                }
            },
            "no sliding_window: 0",
        ),
        ({"transformer_layer_config": {"layer_types": ["sliding_attention"]}}, "no sliding_window"),
    ],
)
def test_configs_that_are_refused(
    fields: dict[str, Any], message: str, target_path: Path, tmp_path: Path
) -> None:
    path = write_eagle3(tmp_path, target_path, GOLDEN, NBR)
    config = json.loads((path / "config.json").read_text())
    layers = config["transformer_layer_config"] | fields.pop("transformer_layer_config", {})
    config |= {"transformer_layer_config": layers} | fields
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VLLMValidationError, match=message):
        eagle3(target_path, path)
