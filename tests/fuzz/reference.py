# SPDX-License-Identifier: Apache-2.0
"""What each request must produce: the same request on an engine of its own, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.extraction_options import extraction
from tests.fuzz.engines import make_config
from tests.fuzz.workload import Spec
from vllm import RequestOutput
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

#: of sums whose terms are added in another order; a wrong state is off by orders of magnitude
LOGPROB_ERROR = 2e-3
ROW_ERROR = 1e-3


@dataclass(frozen=True)
class Result:
    """A finished request: its last output, merged, and its rows if they are extracted."""

    output: RequestOutput
    rows: Tensor | None
    row_tokens: list[int] | None


def take_result(output: RequestOutput, extracts: bool) -> Result:
    """Read, and remove as a client would, what the engine stored for a finished request."""
    if not extracts:
        return Result(output, None, None)
    path = (output.kv_transfer_params or {})["hidden_states_path"]
    stored = load_hidden_states(path)
    cleanup_hidden_states(path)
    return Result(output, stored["hidden_states"], stored["token_ids"].tolist())


class Reference:
    """Runs requests alone; each spec once. Nothing a scenario draws reaches this engine."""

    def __init__(self, family: str, storage: Path | None) -> None:
        self.extracts = storage is not None
        options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 8}
        if storage is not None:  # one thread, there from the first request on
            options |= extraction(storage, num_writer_threads=1)
        config = make_config(family, storage, **options)
        self._engine = LLMEngine(config, log_stats=False, multiprocess=False)
        self._results: dict[Spec, Result] = {}
        self._count = 0
        # What an engine makes with its first request, or the first that has a grammar, is there.
        self._run(Spec((1, 2), {"structured_outputs": StructuredOutputsParams(choice=["a"])}))

    def result(self, spec: Spec) -> Result:
        found = self._results.get(spec)
        if found is None:
            found = self._results[spec] = self._run(spec)
        return found

    def _run(self, spec: Spec) -> Result:
        self._count += 1
        prompt: Any = {"prompt_token_ids": list(spec.prompt)}
        self._engine.add_request(str(self._count), prompt, spec.params())
        outputs: list[RequestOutput] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        assert outputs[-1].finished
        return take_result(outputs[-1], self.extracts)

    def answer(self, spec: Spec) -> tuple[list[int], str]:
        """Tokens and text of the first completion."""
        completion = self.result(spec).output.outputs[0]
        return list(completion.token_ids), completion.text

    def forget(self) -> None:
        """Nobody asks for the specs so far again."""
        self._results.clear()

    def close(self) -> None:
        self._engine.shutdown()


# ---- comparing -----------------------------------------------------------------------------------


def differences(spec: Spec, expected: Result, got: Result) -> list[str]:
    """How a finished request differs from the same one alone; empty if it does not."""
    found: list[str] = []
    want, have = expected.output, got.output
    if have.prompt_token_ids != list(spec.prompt):
        found.append("another prompt came back")
    if [c.index for c in have.outputs] != [c.index for c in want.outputs]:
        return [*found, f"completions {[c.index for c in have.outputs]}"]
    for one, other in zip(want.outputs, have.outputs, strict=True):
        found += _completion_differences(one, other)
    if not _close(_flat(want.prompt_logprobs), _flat(have.prompt_logprobs)):
        found.append("prompt logprobs differ")
    if not found and expected.rows is not None:
        found += _row_differences(spec, expected, got)
    return found


def prefix_differences(expected: Result, output: RequestOutput) -> list[str]:
    """As `differences`, of a request that was ended from outside: what came must be a beginning."""
    wanted = {c.index: list(c.token_ids) for c in expected.output.outputs}
    found = []
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        if tokens != wanted[completion.index][: len(tokens)]:
            found.append(f"completion {completion.index}: {tokens} does not begin the expected one")
    return found


def _completion_differences(want: CompletionOutput, have: CompletionOutput) -> list[str]:
    where = f"completion {want.index}: "
    found = []
    if list(have.token_ids) != list(want.token_ids):
        found.append(f"{where}tokens {list(have.token_ids)} instead of {list(want.token_ids)}")
    elif have.text != want.text:
        found.append(f"{where}text {have.text!r} instead of {want.text!r}")
    elif not _close(_flat(want.logprobs), _flat(have.logprobs)):
        found.append(f"{where}logprobs differ")
    ends = (have.finish_reason, have.stop_reason), (want.finish_reason, want.stop_reason)
    if ends[0] != ends[1]:
        found.append(f"{where}ended by {ends[0]} instead of {ends[1]}")
    return found


def _row_differences(spec: Spec, expected: Result, got: Result) -> list[str]:
    assert expected.rows is not None and got.rows is not None
    tokens = list(spec.prompt)
    asked = (spec.options.get("extra_args") or {})["kv_transfer_params"]
    if asked["include_output_tokens"]:
        tokens += list(got.output.outputs[0].token_ids)[:-1]
    found = []
    if got.row_tokens != tokens or len(got.rows) != len(tokens):
        found.append(
            f"the file has {len(got.rows)} rows of {len(got.row_tokens or ())} tokens, the reply "
            f"counts {len(tokens)}"
        )
    elif got.rows.shape == expected.rows.shape:
        error = (got.rows - expected.rows).abs().max() / expected.rows.abs().max()
        if not error <= ROW_ERROR:
            found.append(f"hidden rows differ by {error:.2g} of the largest value")
    else:
        found.append(f"rows of shape {tuple(got.rows.shape)}")
    return found


def _flat(positions: Sequence[Any] | None) -> Tensor | None:
    """The log-probabilities of each position: of its own token, then of the most likely ones. Two
    of these that are equal but for rounding may change places."""
    if positions is None:
        return None
    values = [listed.logprob for p in positions if p for listed in p.values()]
    return torch.tensor(values, dtype=torch.float64)


def _close(want: Tensor | None, have: Tensor | None) -> bool:
    if want is None or have is None:
        return want is have
    if want.shape != have.shape:
        return False
    return bool(torch.isclose(want, have, rtol=LOGPROB_ERROR, atol=LOGPROB_ERROR).all())
