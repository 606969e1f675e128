# SPDX-License-Identifier: Apache-2.0
"""Requests of one call reach the core together."""

from __future__ import annotations

import pytest

from tests.v1.engine.test_llm_engine import make_engine, prompt_of, run
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.request_batch import RequestBatch

pytestmark = pytest.mark.usefixtures("forking")

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def _step_sizes(engine):
    """Requests in each step that computed anything."""
    (sizes,) = engine.collective_rpc("step_sizes")
    return [size for size in sizes if size]


def _submit(engine, num_prompts, length=20, params=PARAMS):
    batch = RequestBatch(engine.vllm_config.scheduler_config, engine.send_requests)
    for i in range(num_prompts):
        batch.add(engine.prepare_request(str(i), prompt_of(i, length), params))
    batch.send()


@pytest.mark.parametrize("multiprocess", [False, True])
def test_prompts_that_fit_a_step_run_in_one(multiprocess):
    engine = make_engine(multiprocess)
    _submit(engine, 8)
    assert len(run(engine)) == 8
    assert _step_sizes(engine) == [8] * 4
    engine.shutdown()


def test_completions_of_one_request_run_in_one_step():
    engine = make_engine(True, caching=False)
    engine.add_request("a", prompt_of(0, 20), SamplingParams(n=6, max_tokens=3, ignore_eos=True))
    run(engine)
    assert _step_sizes(engine) == [6] * 3
    engine.shutdown()


def test_a_full_step_of_prompts_is_not_kept_waiting(monkeypatch):
    """Tokenising thousands of prompts takes seconds: the first ones start meanwhile."""
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=100)
    sent = []
    monkeypatch.setattr(engine.engine_core, "add_requests", lambda r: sent.append(len(r)))
    _submit(engine, 7)
    assert sent == [3, 3, 1], "by requests"
    sent.clear()
    engine = make_engine(max_num_seqs=16, max_num_batched_tokens=100)
    monkeypatch.setattr(engine.engine_core, "add_requests", lambda r: sent.append(len(r)))
    _submit(engine, 12)
    assert sent == [5, 5, 2], "by tokens"


def test_prepared_requests_can_be_given_up():
    engine = make_engine(True)
    engine.prepare_request("a", prompt_of(0, 20), PARAMS)
    assert engine.has_unfinished_requests()
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    engine.add_request("a", prompt_of(0, 20), PARAMS)
    assert list(run(engine)) == ["a"]
    engine.shutdown()
