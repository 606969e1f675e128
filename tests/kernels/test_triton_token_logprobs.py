# SPDX-License-Identifier: Apache-2.0
"""Logprobs, likeliest tokens and ranks against a sorted log-softmax."""

import pytest
import torch

from vllm.kernels.sampling.logprobs import ranked_logprobs


@pytest.mark.parametrize("vocab, count", [(70, 0), (70, 2), (9001, 1), (9001, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_log_softmax(vocab, count, dtype, device):
    logits = (torch.randn(6, vocab + 8) * 3).to(dtype).to(device)[:, :vocab]
    chosen = torch.randint(0, vocab, (6,)).to(device)
    chosen[1] = logits[1].argmax()
    ids, logprobs, ranks = ranked_logprobs.run(logits, chosen, count)
    expected = logits.double().log_softmax(-1)
    assert torch.equal(ids[:, 0].long(), chosen) and ids.shape == (6, count + 1)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, ids.long()), atol=2e-6, rtol=0)
    top = expected.topk(count, dim=1).values
    torch.testing.assert_close(logprobs[:, 1:].double(), top, atol=2e-6, rtol=0)
    assert all(len(set(row[1:])) == count for row in ids.tolist())
    above = (logits > logits.gather(1, chosen.unsqueeze(1))).sum(1) + 1
    assert torch.equal(ranks.long(), above) and ranks[1] == 1


def test_a_row_with_few_possible_tokens_names_none_beyond_the_vocabulary(device):
    logits = torch.full((1, 70), float("-inf"), device=device)
    logits[0, 69] = 1.0
    ids, logprobs, ranks = ranked_logprobs.run(logits, torch.tensor([69], device=device), 2)
    assert ids[0, :2].tolist() == [69, 69] and 0 <= ids[0, 2] < 70
    assert logprobs[0].tolist() == [0.0, 0.0, float("-inf")] and ranks[0] == 1


def test_more_groups_than_the_vocabulary_has_are_refused(device):
    with pytest.raises(ValueError, match="at most 2"):
        ranked_logprobs.run(torch.zeros(1, 70), torch.zeros(1, dtype=torch.int64), 3)
