# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4, served: logits and tokens are transformers', whatever happens to a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepseek_v4_logits import FAMILY, IDS, prompt_logits
from draft_scenarios import Run, a_conversation, batches, compare, engine, preemptions
from parity_checks import MakeEngine, assert_equals, in_this_process, prompts
from tiny_models import hf_model, hf_reference_logits, tiny_model

from tests.extraction_options import extraction
from vllm import SamplingParams, TokensPrompt

pytestmark = [pytest.mark.parity, in_this_process]


@pytest.mark.parametrize("chunk", [2048, 37])
def test_logits(chunk: int, make_engine: MakeEngine) -> None:
    """Past two entries of the coarsest layer, many of the others, and the window; cut or whole."""
    llm = make_engine(FAMILY, max_num_batched_tokens=chunk, max_logprobs=-1)
    expected = hf_reference_logits(tiny_model(FAMILY), IDS)[:-1].log_softmax(-1)
    found = prompt_logits(llm)
    assert found.shape == expected.shape and len(found) >= 300
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "scenario", [batches, a_conversation, preemptions], ids=lambda f: f.__name__
)
def test_tokens_in_batches_from_caches_and_after_preemptions(
    scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    """One token or four at a time."""
    settings: dict[str, Any] = {"family": FAMILY, "enable_prefix_caching": True}
    plain = Run(engine(make_engine, 0, **settings))
    scenario(plain)
    for output in plain.outputs:
        assert_equals(output, hf_model(tiny_model(FAMILY)))
    drafted = Run(engine(make_engine, 3, **settings), plain.tokens())
    scenario(drafted)
    compare(drafted.outputs, plain.outputs)
    accepted, rejected = drafted.drafts()
    assert accepted and rejected


def test_a_cached_prefix_gives_the_same_bits(make_engine: MakeEngine) -> None:
    llm = make_engine(FAMILY, enable_prefix_caching=True, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=4)
    (ids,) = prompts((290,), seed=7)
    cold, warm = (
        llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)[0]
        for _ in range(2)
    )
    assert (warm.num_cached_tokens or 0) >= 256
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs


def test_there_is_no_single_stream_to_extract(make_engine: MakeEngine, tmp_path: Path) -> None:
    message = "DeepseekV4ForCausalLM cannot return hidden states of its layers"
    with pytest.raises(ValueError, match=message):
        make_engine(FAMILY, **extraction(tmp_path, [0, 2, 4]))


def test_stages_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="DeepseekV4ForCausalLM is not made for them"):
        make_engine(FAMILY, pipeline_parallel_size=2)
