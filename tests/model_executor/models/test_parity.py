# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers in fp32: logits, greedy tokens, captured streams."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_models import (
    FAMILIES,
    hf_reference_generate,
    hf_reference_logits,
    hf_residual_streams,
    tiny_model,
)
from vllm.sequence import IntermediateTensors

#: largest difference of logits in units of their standard deviation
TOLERANCE = 5e-5
MAX_TOKENS = 12

pytestmark = [pytest.mark.slow, pytest.mark.parity]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


#: these go through an engine in tests/parity, cut in the same ways (of qwen3_5_moe the wrapper's
#: checkpoint is compared here), or differ from DeepSeek-V3 in what test_deepseek compares;
#: deepseek_v4 has several residual streams
IN_ENGINES = (
    *("qwen3_5_moe", "granite_h", "granite_h_dense", "falcon_h1", "bamba"),
    *("nemotron_h", "nemotron_h_moe", "kimi_linear", "deepseek_v2"),
    *("olmo_hybrid", "gemma3", "gemma3_wrapper", "gpt_oss", "deepseek_v4"),
)


@pytest.fixture(params=[family for family in FAMILIES if family not in IN_ENGINES])
def path(request: pytest.FixtureRequest) -> Path:
    return tiny_model(request.param)


@pytest.fixture
def harness(path: Path) -> Harness:
    return Harness(path)


def test_prefill_logits(path: Path, harness: Harness) -> None:
    ids = prompt(77)
    assert error(harness.logits([Chunk(0, 0, ids)]), hf_reference_logits(path, ids)) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 64])
def test_greedy_tokens_do_not_depend_on_chunks(
    path: Path, harness: Harness, chunk_size: int | None
) -> None:
    ids = prompt(70, seed=1)
    expected = hf_reference_generate(path, ids, MAX_TOKENS)
    assert harness.generate(ids, MAX_TOKENS, chunk_size) == expected


def test_ragged_batch_of_decodes_and_prefills(path: Path, harness: Harness) -> None:
    """A decode, a continued prefill and a new prefill in one step, on caches used before."""
    old = [prompt(40, seed=i) for i in range(3)]
    for seq, ids in enumerate(old):
        harness.logits([Chunk(seq, 0, ids)])
    first, second, third = (prompt(n, seed=9) for n in (31, 50, 20))
    harness.logits([Chunk(0, 0, first[:-1]), Chunk(1, 0, second[:19])])
    chunks = [Chunk(0, 30, first[-1:]), Chunk(1, 19, second[19:]), Chunk(2, 0, third)]
    found = harness.logits(chunks).split([1, 31, 20])
    assert error(found[0], hf_reference_logits(path, first)[30:]) < TOLERANCE
    assert error(found[1], hf_reference_logits(path, second)[19:]) < TOLERANCE
    assert error(found[2], hf_reference_logits(path, third)) < TOLERANCE


def test_captured_streams(path: Path, harness: Harness) -> None:
    """Ids are residual streams, ascending, a repeated id is a repeated column."""
    ids = prompt(33, seed=2)
    streams = hf_residual_streams(path, ids)
    plain = harness.step([Chunk(0, 0, ids)])
    harness.model.set_aux_hidden_state_layers((0, 2, 2, 4, 1))
    hidden, aux = harness.step([Chunk(0, 0, ids)])
    torch.testing.assert_close(hidden, plain, rtol=0, atol=0)
    assert len(aux) == 5
    for found, layer in zip(aux, (0, 1, 2, 2, 4), strict=True):
        assert error(found.cpu(), streams[layer]) < TOLERANCE


def test_captured_streams_of_a_decode_step(path: Path, harness: Harness) -> None:
    ids = prompt(18, seed=3)
    harness.model.set_aux_hidden_state_layers((2, 4))
    harness.step([Chunk(0, 0, ids[:-1])])
    _, aux = harness.step([Chunk(0, 17, ids[-1:])])
    streams = hf_residual_streams(path, ids)
    assert error(aux[0].cpu(), streams[2][-1:]) < TOLERANCE
    assert error(aux[1].cpu(), streams[4][-1:]) < TOLERANCE


def test_stream_ids_outside_the_model(harness: Harness) -> None:
    with pytest.raises(ValueError, match=r"\[5, -1\] are outside 0\.\.4"):
        harness.model.set_aux_hidden_state_layers((5, 2, -1))


def test_inputs_embeds_equal_input_ids(harness: Harness) -> None:
    ids = torch.tensor(prompt(9), device=harness.device)
    embeds = harness.model.embed_input_ids(ids)
    expected = harness.step([Chunk(0, 0, ids.tolist())])
    forward = harness.model.forward
    harness.model.forward = lambda _, positions: forward(None, positions, None, embeds)
    torch.testing.assert_close(harness.step([Chunk(1, 0, ids.tolist())]), expected)


def test_a_stage_takes_the_stream_instead_of_ids(harness: Harness) -> None:
    """What the pipeline stage before would hand over: here, the embeddings."""
    ids = torch.arange(40, 60)
    expected = harness.step([Chunk(0, 0, ids.tolist())])
    stream = IntermediateTensors({"hidden_states": harness.model.embed_input_ids(ids)})
    forward = harness.model.forward
    harness.model.forward = lambda _, positions: forward(None, positions, stream)
    torch.testing.assert_close(harness.step([Chunk(1, 0, ids.tolist())]), expected)


class DamagedState(Harness):
    """Zeroes one of the recurrent states (0 convolution, 1 matrix) before every decode."""

    damaged: int | None = None

    def before_decode(self, seq: int) -> None:
        for layer in self.layers.values():
            if isinstance(layer.kv_cache, tuple) and self.damaged is not None:
                layer.kv_cache[self.damaged][1 + seq].zero_()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_greedy_tokens_notice_a_lost_state(family: str) -> None:
    """The comparison above has power: without either state the tokens differ."""
    path, ids = tiny_model(family), prompt(70, seed=1)
    harness = DamagedState(path)
    expected = harness.generate(ids, MAX_TOKENS)
    logits = hf_reference_logits(path, ids + expected[:-1])[len(ids) - 1 :]
    assert logits.argmax(-1).tolist() == expected
    for harness.damaged in (0, 1):
        found = harness.generate(ids, MAX_TOKENS)
        assert sum(a == b for a, b in zip(found, expected, strict=True)) < MAX_TOKENS // 2
