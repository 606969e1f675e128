# SPDX-License-Identifier: Apache-2.0
"""DFlash drafters against the speculators library's own model and checkpoints, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.dflash_models import MASK_ID, Block, DFlashReference, write_dflash
from tests.draft_models import TINY, Shape, gen
from tests.model_executor.harness import BLOCK_SIZE, BLOCKS_PER_SEQ, get_model, make_config
from tests.tiny_models import tiny_model
from vllm.config.draft_methods import resolve_method
from vllm.config.draft_methods.dflash import DFlashSettings
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.step import Progress
from vllm.model_executor.models.dflash import DFlashDraftModel
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.state_layers import collect_layers
from vllm.v1.attention.backends.paged import PagedAttentionMetadata
from vllm.v1.spec_decode.dflash_drafter import DFlashDrafter

TOKENS = [(37 * i * i + 11 * i + 5) % TINY.vocab for i in range(40)]
#: residual streams side by side, in the order of the layers
STREAMS = gen("dflash.streams", [len(TOKENS), 3 * TINY.hidden], 2.0).float()
ANCHORS = (3, 17, 30)

BLOCKS = {
    "full": Block(size=4, windows=(None, None)),
    "causal windows": Block(size=6, windows=(9, 9)),
    "windows": Block(size=6, windows=(9, None), non_causal=True),
    "from the anchor": Block(size=5, windows=(None, 7), from_anchor=True),
}


class Drafting:
    """A drafter of the tiny target over caches that are NaN where nothing was written."""

    def __init__(self, path: Path, target: Path, **fields: Any) -> None:
        config = make_config(target)
        settings = DFlashSettings(model=str(path), **fields).resolved(config.model_config, None)
        progress = Progress.create(2, 1 + settings.num_drafts, torch.device("cpu"))
        self.drafter = DFlashDrafter(config, settings, progress)
        self.target = get_model(config)
        self.head = self.drafter.build_model(self.target)
        assert isinstance(self.head, DFlashDraftModel)
        self.drafter.load_weights()
        self.layers = collect_layers(config, self.head)
        for layer in self.layers.values():
            spec: Any = layer.get_kv_cache_spec(config)
            blocks = 1 + len(ANCHORS) * BLOCKS_PER_SEQ
            layer.kv_cache = torch.full((blocks, *spec.views[0].shape), torch.nan)

    def run(self, size: int) -> Tensor:
        """Logits `[anchors, size, draft vocab]` of the blocks after `ANCHORS`."""
        return self.head.logits(self.normed(size).flatten(0, 1)).unflatten(0, (-1, size))

    def normed(self, size: int) -> Tensor:
        """Of these blocks, one sequence each, the context of which is written in two chunks."""
        slots = torch.arange(BLOCKS_PER_SEQ * BLOCK_SIZE)
        fused = self.head.fuse(STREAMS, list(STREAMS.chunk(3, dim=-1)))
        for seq, anchor in enumerate(ANCHORS):
            for part in (torch.arange(2), torch.arange(2, anchor)):
                with set_forward_context(self._context(slots[part] + self._first(seq))):
                    self.head.keep_context(part, fused[part])
        ids = torch.tensor([[TOKENS[a], *[MASK_ID] * (size - 1)] for a in ANCHORS])
        positions = torch.tensor(ANCHORS)[:, None] + torch.arange(size)
        places = positions + torch.tensor([[self._first(s)] for s in range(len(ANCHORS))])
        with set_forward_context(self._context(places.flatten(), size)):
            return self.head(ids.flatten(), positions.flatten()).unflatten(0, ids.shape)

    @staticmethod
    def _first(seq: int) -> int:
        return (1 + seq * BLOCKS_PER_SEQ) * BLOCK_SIZE

    def _context(self, slots: Tensor, width: int = 0) -> ForwardContext:
        count, none = len(ANCHORS), torch.zeros(0, dtype=torch.int32)
        table = 1 + torch.arange(count * BLOCKS_PER_SEQ, dtype=torch.int32).view(count, -1)
        metadata = PagedAttentionMetadata(
            num_tokens=count * width,
            num_reqs=count,
            num_decodes=count,
            decode_width=width,
            max_query_len=width,
            max_seq_len=256,
            max_decode_len=256,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32) * width,
            query_start_loc_cpu=np.arange(count + 1) * width,
            num_computed_tokens_cpu=np.array(ANCHORS),
            prefill_query_start_loc=none,
            prefill_query_start_loc_cpu=none.numpy(),
            seq_lens=torch.tensor(ANCHORS, dtype=torch.int32) + width,
            seq_lens_cpu=np.array(ANCHORS) + width,
            block_table=table,
            block_table_cpu=table.numpy(),
            prefill_seq_lens=none,
            prefill_block_table=none,
            slot_mapping=slots,
        )
        names = list(self.layers)
        return ForwardContext(
            self.layers,
            dict.fromkeys(names, metadata),
            dict.fromkeys(names, slots),
            num_tokens=len(slots),
            only_decodes=True,
            decode_width=max(width, 1),
        )


@pytest.fixture(scope="module")
def target() -> Path:
    return tiny_model("qwen3_5")


def of_target(path: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Its embedding and output head."""
    from tests.tiny_models import hf_model

    model = hf_model(path)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    embed, head = (weight.detach().to(dtype) for weight in weights)
    return embed, head


@pytest.mark.parametrize("markov_rank", [0, 8])
@torch.inference_mode()
def test_drafts_are_the_speculators_models(markov_rank: int, target: Path, tmp_path: Path) -> None:
    """Of dspark its own head says what the draft before adds to the logits."""
    block = BLOCKS["from the anchor"]
    theirs, expected, ids = speculators_run(block, target, tmp_path, markov_rank)
    drafting = Drafting(tmp_path, target)
    newest = torch.tensor([TOKENS[anchor] for anchor in ANCHORS])
    rows = [newest]
    for logits in expected.unbind(1):
        if markov_rank:
            hidden = torch.zeros(len(newest), 1, TINY.hidden)
            added = theirs.markov_head.block_bias(
                prev_token_ids=rows[-1][:, None], hidden_states=hidden
            )
            logits = logits + added[:, 0]
        rows.append(ids[logits.argmax(-1)])
    found = drafting.head.choose(drafting.normed(block.size), newest)
    assert torch.equal(found, torch.stack(rows[1:], dim=1))
    assert torch.equal(found, ids[expected.argmax(-1)]) == (markov_rank == 0)


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_logits_are_the_speculators_models(name: str, target: Path, tmp_path: Path) -> None:
    block = BLOCKS[name]
    _, expected, ids = speculators_run(block, target, tmp_path)
    drafting = Drafting(tmp_path, target)
    torch.testing.assert_close(drafting.run(block.size), expected, rtol=0, atol=2e-5)
    assert drafting.drafter.settings.num_speculative_tokens == block.size - block.first
    assert torch.equal(drafting.head.target_ids(torch.arange(3)), ids[:3])


def speculators_run(
    block: Block, target: Path, path: Path, markov_rank: int | None = None
) -> tuple[Any, Tensor, Tensor]:
    """The library's model of type dflash, or dspark with a rank, saved at `path`; the logits
    `[anchors, block, draft vocab]` that its layers give for the blocks of all anchors at once; and
    the target's ids of its vocabulary."""
    pytest.importorskip("speculators")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    kind: Any = (DFlashDraftModel, DFlashSpeculatorConfig)
    own: dict[str, Any] = {}
    if markov_rank is not None:
        kind = (DSparkDraftModel, DSparkSpeculatorConfig)
        own = {"markov_rank": markov_rank, "confidence_head_with_markov": markov_rank > 0}
    window = next((w for w in block.windows if w is not None), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in block.windows]
    layers = Qwen3Config(
        num_hidden_layers=len(kinds),
        vocab_size=TINY.vocab,
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        layer_types=kinds,
        sliding_window=window,
        use_sliding_window=window is not None,
        attn_implementation="eager",
    )
    proposal = GreedyTokenProposalConfig(speculative_tokens=block.size - block.first)
    config = kind[1](
        transformer_layer_config=layers,
        draft_vocab_size=TINY.draft_vocab,
        block_size=block.size,
        aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=MASK_ID,
        sample_from_anchor=block.from_anchor,
        sliding_window_non_causal=block.non_causal,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash" if markov_rank is None else "dspark",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=[]),
        ),
        **own,
    )
    torch.manual_seed(0)
    theirs = kind[0](config)
    kept = torch.arange(TINY.vocab) % 2 == 0
    kept[TINY.draft_vocab * 2 :] = False
    ids = kept.nonzero().flatten()
    theirs.load_vocab_mappings(kept, ids - torch.arange(len(ids)))
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.7, 1.3)
    theirs.save_pretrained(path)
    theirs.embed_tokens.weight.copy_(of_target(target, torch.float32)[0])
    count = len(TOKENS)
    _, expected, *_ = theirs._backbone_forward(
        STREAMS[None],
        torch.tensor([TOKENS]),
        torch.ones(1, count),
        torch.zeros(1, count, TINY.hidden),
        torch.zeros(1, count, dtype=torch.int64),
        max_anchors=count - block.size,
    )
    return theirs, expected[0].unflatten(0, (-1, block.size))[list(ANCHORS)], ids


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_logits_are_the_references(name: str, target: Path, tmp_path: Path) -> None:
    """In fp64, of a whole vocabulary: the output head is the target's."""
    block, shape = BLOCKS[name], Shape(**vars(TINY) | {"draft_vocab": TINY.vocab})
    path = write_dflash(tmp_path, target, shape, block)
    from tests.dflash_models import dflash_tensors

    weights = of_target(target, torch.float64)
    reference = DFlashReference(dflash_tensors(shape, block), shape, block, *weights)
    fused = reference.fuse(STREAMS, list(STREAMS.double().chunk(3, dim=-1)))
    found = Drafting(path, target).run(block.size)
    for logits, anchor in zip(found, ANCHORS, strict=True):
        exact = reference.drafting(fused[:anchor], TOKENS[anchor])
        torch.testing.assert_close(logits[block.first :].double(), exact, rtol=0, atol=2e-5)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        ({"mask_token_id": None}, None, "lacks mask_token_id"),
        ({"mask_token_id": 10**6}, None, "has mask_token_id 1000000, no token of the target"),
        ({"mask_token_id": -1}, None, "has mask_token_id -1, no token of the target"),
        ({"mask_token_id": True}, None, "has mask_token_id True, no token of the target"),
        ({"draft_vocab_size": True}, None, "has draft_vocab_size True, which must be 1 to"),
        ({"aux_hidden_state_layer_ids": [True, 2, 3]}, None, "must be distinct numbers from 0"),
        ({"trained_on": {"layers": [True, 2, 3, 4]}}, None, "must have the dataset's layer ids"),
        (
            {"speculators_model_type": "dspark", "markov_rank": True},
            None,
            "has markov_rank True, whi",
        ),
        ({"aux_hidden_state_layer_ids": None}, None, "lacks aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, None, "must be distinct numbers from 0"),
        ({"block_size": 1}, None, "blocks have two tokens or more"),
        ({"target_hidden_size": 32}, None, "reads hidden states of 32"),
        ({"layer_config": {"model_type": "llama"}}, None, "draft layers of type llama"),
        (
            {"speculators_model_type": "dspark", "markov_head_type": "gated"},
            None,
            "type gated, which",
        ),
        ({"speculators_model_type": "dflash2"}, None, "of type dflash2, which is not supported"),
        ({"layer_config": {"vocab_size": 99}}, None, "drafts for a vocabulary of 99"),
        ({"layer_config": {"hidden_size": 32}}, None, "has layers of 32 on hidden states of 64"),
        ({}, 4, "must be at most 3, the drafts in a block"),
    ],
)
def test_what_is_refused(
    config: dict[str, Any], asked: int | None, message: str, target: Path, tmp_path: Path
) -> None:
    path = write_dflash(tmp_path, target, TINY, Block(), **config)
    settings = DFlashSettings(model=str(path), num_speculative_tokens=asked)
    with pytest.raises(VLLMValidationError, match=message):
        settings.resolved(make_config(target).model_config, None)


def test_the_method_has_two_names() -> None:
    assert resolve_method("dspark", None) == resolve_method("dflash", None) == "dflash"


def test_a_block_of_more_drafts_than_a_step_verifies(target: Path, tmp_path: Path) -> None:
    path = write_dflash(tmp_path, target, TINY, Block(size=20))
    settings = DFlashSettings(model=str(path)).resolved(make_config(target).model_config, None)
    assert (settings.num_speculative_tokens, settings.lookahead_tokens) == (15, 20)


def test_tensors_that_do_not_fit(target: Path, tmp_path: Path) -> None:
    from tests.dflash_models import dflash_tensors

    tensors = dflash_tensors(TINY, Block()) | {"mask_hidden": torch.zeros(1, 1, 192)}
    path = write_dflash(tmp_path, target, TINY, Block(), tensors=tensors)
    with pytest.raises(WeightsError, match="surplus: mask_hidden"):
        Drafting(path, target)
