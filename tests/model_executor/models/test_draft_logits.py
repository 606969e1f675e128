# SPDX-License-Identifier: Apache-2.0
"""Logits that drafts are chosen from: the whole, or a rank's part, and the record of which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from vllm.decisions import DecisionLog
from vllm.distributed.parallel_state import as_first_rank_of, without_communication
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.draft_logits import DraftLogits
from vllm.model_executor.models.interfaces import SharesVocabulary

HIDDEN, VOCAB, WIDTH = 8, 100, 64


class Gathers(nn.Module):
    """A model of another package, whose logits are whole on every rank."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_ones(len(hidden_states), VOCAB)


class Shares(nn.Module, SharesVocabulary):
    """As the models here are."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head, self.logits_processor = head(), LogitsProcessor(VOCAB)

    @property
    def output_head(self) -> ParallelLMHead:
        return self.lm_head

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def own_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor.own(self.lm_head, hidden_states)


def head() -> ParallelLMHead:
    """Of one rank, or the first of several; rows of padding would win."""
    made = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32)
    torch.manual_seed(0)
    made.weight.data.copy_(torch.randn_like(made.weight))
    made.weight.data[VOCAB:] = 100.0
    return made


@pytest.fixture
def log() -> Iterator[DecisionLog]:
    made = DecisionLog(is_logged=False)
    with made.current():
        yield made


def told(log: DecisionLog) -> str | None:
    return next((d.chosen for d in log.decisions() if d.what == "logits of drafts"), None)


@torch.inference_mode()
def test_one_rank_has_the_whole(log: DecisionLog) -> None:
    rows, own = torch.rand(3, HIDDEN), head()
    expected = rows @ own.weight[:VOCAB].T
    model = Shares()
    for logits in (DraftLogits.of_head(own, LogitsProcessor(VOCAB)), DraftLogits.of_model(model)):
        assert logits.shard is None
        torch.testing.assert_close(logits(rows), expected)
        assert torch.equal(logits.best(logits(rows)), expected.argmax(1))
    assert told(log) is None


@torch.inference_mode()
def test_a_rank_keeps_its_part(log: DecisionLog) -> None:
    """The other, which has the same here, has the tokens after them."""
    rows = torch.rand(3, HIDDEN)
    with as_first_rank_of(2), without_communication():
        own, model = head(), Shares()
        for logits in (
            DraftLogits.of_head(own, LogitsProcessor(VOCAB)),
            DraftLogits.of_model(model),
        ):
            found = logits(rows)
            assert found.shape == (3, WIDTH)
            torch.testing.assert_close(found, rows @ own.weight.T)
            assert torch.equal(logits.best(found), found.argmax(1))
            # A draft is a token, also where there is no logit.
            found[0], found[1], found[2, 63] = torch.nan, -torch.inf, 1e9
            assert logits.best(found).tolist() == [0, 0, 63]
    assert told(log) == "each rank keeps its own"


@torch.inference_mode()
def test_a_model_that_gathers_is_recorded(log: DecisionLog) -> None:
    rows = torch.rand(3, HIDDEN)
    assert DraftLogits.of_model(Gathers()).shard is None and told(log) is None
    with as_first_rank_of(2):
        logits = DraftLogits.of_model(Gathers())
    assert logits.shard is None and logits(rows).shape == (3, VOCAB)
    assert told(log) == "gathered whole"
    (record,) = (d for d in log.decisions() if d.what == "logits of drafts")
    assert "Gathers does not leave them" in record.why
