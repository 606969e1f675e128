# SPDX-License-Identifier: Apache-2.0
"""One table of parameter combinations: HTTP, streamed HTTP, `LLM` and transformers agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import LAYOUT_FLAGS, LAYOUT_SETTINGS, MULTIPROCESSING
from tiny_models import hf_model

from tests.e2e.remote_server import RemoteServer
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.parity, pytest.mark.e2e]

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
PROMPTS = ("def read_lines(path):\n", "class Größe:\n    def __init__(self, name):\n")
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@dataclass(frozen=True)
class Case:
    """`params`: as sent. `hf`: the same for transformers' greedy `generate`; None: it has no equal.

    `words` become `bad_words_ids` with the tokenizer at hand.
    """

    name: str
    params: dict[str, Any]
    hf: dict[str, Any] | None = field(default_factory=dict)


CASES = [
    Case("plain", {}),
    Case("one token", {"max_tokens": 1, "logprobs": 5}),
    Case("logprobs", {"logprobs": 3}),
    Case("prompt logprobs", {"prompt_logprobs": 2, "logprobs": 0}),
    Case("stop", {"stop": ["\n"]}, {"stop_strings": ["\n"]}),
    Case("stop kept", {"stop": "return", "include_stop_str_in_output": True, "max_tokens": 60},
         {"stop_strings": ["return"], "max_new_tokens": 60}),
    Case("stop and logprobs", {"stop": [")", ":"], "logprobs": 2}, {"stop_strings": [")", ":"]}),
    Case("two stops", {"stop": ["zzz", "\n\n"], "logprobs": 0}, {"stop_strings": ["zzz", "\n\n"]}),
    Case("never stops", {"stop": ["zzzzzz"], "ignore_eos": True}, {"eos_token_id": None}),
    Case("stop ids", {"stop_token_ids": "NEWLINES"}, {"eos_token_id": "NEWLINES"}),
    Case("stop ids, not yet", {"stop_token_ids": "NEWLINES", "min_tokens": 12},
         {"eos_token_id": "NEWLINES", "min_new_tokens": 12}),
    Case("repetition", {"repetition_penalty": 1.3, "logprobs": 1}, {"repetition_penalty": 1.3}),
    Case("bad words", {"bad_words": ["return", "self"]}, {"bad_words": ["return", "self"]}),
    Case("top k of one", {"temperature": 1.0, "top_k": 1, "seed": 3, "logprobs": 1}),
    Case("top p of nothing", {"temperature": 0.7, "top_p": 1e-6, "seed": 3}),
    Case("min p of all", {"temperature": 0.7, "min_p": 1.0}),
    Case("presence", {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 1}, None),
    Case("bias", {"logit_bias": {"300": 100}, "max_tokens": 4, "logprobs": 1}, None),
    Case("allowed", {"allowed_token_ids": [300, 301, 302], "ignore_eos": True}, None),
    Case("seed", {"temperature": 1.0, "seed": 7, "logprobs": 2}, None),
    Case("negative seed", {"temperature": 0.8, "seed": -9, "top_p": 0.9}, None),
    Case("seed, all filters",
         {"temperature": 0.9, "seed": 1, "top_p": 0.95, "top_k": 30, "min_p": 0.01,
          "repetition_penalty": 1.1, "logprobs": 1}, None),
    Case("n", {"temperature": 1.0, "seed": 11, "n": 3, "logprobs": 1}, None),
    Case("n, stop", {"temperature": 1.0, "seed": 5, "n": 2, "stop": ["\n"], "max_tokens": 40},
         None),
    Case("n, stop ids, least", {"temperature": 1.0, "seed": 2, "n": 2, "min_tokens": 6,
                                "stop_token_ids": "NEWLINES", "prompt_logprobs": 1}, None),
]  # fmt: skip


@dataclass(frozen=True)
class Sides:
    """Every way to run the model."""

    llm: LLM
    server: RemoteServer
    tokenizer: Any

    def resolve(self, params: dict[str, Any]) -> dict[str, Any]:
        """Ids of every token with a line break, where a case says so."""
        resolved = dict(params)
        for key, value in params.items():
            if value == "NEWLINES":
                ids = range(len(self.tokenizer))
                resolved[key] = [i for i in ids if "\n" in self.tokenizer.decode([i])]
        return resolved


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    memory = 64 * 2**20  # server and `LLM` share the device
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    flags += ["--kv-cache-memory-bytes", str(memory), *LAYOUT_FLAGS]
    with pytest.MonkeyPatch.context() as patch, RemoteServer(MODEL, *flags) as server:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", MULTIPROCESSING)
        llm = LLM(
            str(MODEL),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            kv_cache_memory_bytes=memory,
            **LAYOUT_SETTINGS,
        )
        yield Sides(llm, server, llm.get_tokenizer())
        llm.shutdown()


def close(ours: Any, theirs: Any) -> bool:
    """Equal logprobs, up to fp32 rounding of another batch shape."""
    return bool(ours == pytest.approx(theirs, abs=2e-4))


def offline(sides: Sides, prompt: str, params: dict[str, Any]) -> RequestOutput:
    params = {**GREEDY, **params}
    (output,) = sides.llm.generate(prompt, SamplingParams.from_optional(**params), use_tqdm=False)
    return output


def over_http(sides: Sides, prompt: str, params: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"prompt": prompt, **GREEDY, **params, "return_token_ids": True}
    choices: list[dict[str, Any]] = sides.server.post("/v1/completions", **body)["choices"]
    return choices


def streamed(sides: Sides, prompt: str, params: dict[str, Any]) -> dict[int, tuple[str, Any, Any]]:
    """Text, finish and stop reason by index."""
    body = {"prompt": prompt, **GREEDY, **params, "stream": True}
    found: dict[int, tuple[str, Any, Any]] = {}
    with sides.server.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text, finish, stop = found.get(choice["index"], ("", None, None))
                    found[choice["index"]] = (
                        text + choice["text"],
                        choice["finish_reason"] or finish,
                        choice["stop_reason"] or stop,
                    )
    return found


def check_same(ours: CompletionOutput, theirs: dict[str, Any]) -> None:
    assert theirs["token_ids"] == list(ours.token_ids)
    assert theirs["text"] == ours.text
    assert theirs["finish_reason"] == ours.finish_reason
    assert theirs["stop_reason"] == ours.stop_reason
    if ours.logprobs is None:
        assert theirs["logprobs"] is None
        return
    chosen = [row[t].logprob for row, t in zip(ours.logprobs, ours.token_ids, strict=True)]
    assert close(theirs["logprobs"]["token_logprobs"], chosen)
    for row, top in zip(ours.logprobs, theirs["logprobs"]["top_logprobs"], strict=True):
        by_text = {entry.decoded_token: entry.logprob for entry in row.values()}
        assert close({t: v for t, v in top.items() if t in by_text}, by_text)


def check_prompt_logprobs(ours: RequestOutput, theirs: list[dict[str, Any]]) -> None:
    rows = theirs[0]["prompt_logprobs"]
    assert rows[0] is None and ours.prompt_logprobs is not None
    assert len(rows) == len(ours.prompt_logprobs)
    for row, expected in zip(rows[1:], ours.prompt_logprobs[1:], strict=True):
        assert expected is not None
        assert set(row) == {str(token) for token in expected}
        for token, entry in expected.items():
            assert row[str(token)]["rank"] == entry.rank
            assert close(row[str(token)]["logprob"], entry.logprob)


@torch.no_grad()
def check_transformers(sides: Sides, prompt: str, case: Case, ours: RequestOutput) -> None:
    assert case.hf is not None
    options = {"max_new_tokens": (GREEDY | case.params)["max_tokens"], **sides.resolve(case.hf)}
    if words := options.pop("bad_words", None):
        forms = [form for word in words for form in (word, " " + word)]
        encode = sides.tokenizer.encode
        options["bad_words_ids"] = [encode(form, add_special_tokens=False) for form in forms]
    eos = sides.tokenizer.eos_token_id
    if isinstance(options.get("eos_token_id"), list):
        options["eos_token_id"] = [eos, *options["eos_token_id"]]
    ids = sides.tokenizer(prompt, return_tensors="pt")
    generated = hf_model(MODEL).generate(
        **ids, **options, do_sample=False, pad_token_id=eos, tokenizer=sides.tokenizer,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    tokens = generated.sequences[0, ids.input_ids.shape[1] :].tolist()
    (completion,) = ours.outputs
    assert list(completion.token_ids) == tokens
    if completion.logprobs is not None:
        logits = torch.stack(generated.logits)[:, 0].log_softmax(-1)
        for i, (row, token) in enumerate(zip(completion.logprobs, tokens, strict=True)):
            assert close(row[token].logprob, logits[i, token].item())
            assert row[token].rank == 1 + int((logits[i] > logits[i, token]).sum())
    if ours.prompt_logprobs is not None:
        logits = hf_model(MODEL)(ids.input_ids).logits[0].log_softmax(-1)
        for i, row in enumerate(ours.prompt_logprobs[1:]):
            assert row is not None
            for token, entry in row.items():
                assert close(entry.logprob, logits[i, token].item())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_all_agree(sides: Sides, case: Case) -> None:
    prompt = PROMPTS[CASES.index(case) % len(PROMPTS)]
    params = sides.resolve(case.params)
    ours = offline(sides, prompt, params)
    theirs = over_http(sides, prompt, params)
    assert [c.index for c in ours.outputs] == list(range(params.get("n", 1)))
    for completion, choice in zip(ours.outputs, theirs, strict=True):
        check_same(completion, choice)
    if "prompt_logprobs" in params:
        check_prompt_logprobs(ours, theirs)
    else:
        assert streamed(sides, prompt, params) == {
            c.index: (c.text, c.finish_reason, c.stop_reason) for c in ours.outputs
        }
    if case.hf is not None:
        check_transformers(sides, prompt, case, ours)


def test_the_table_reaches_every_way_to_end(sides: Sides) -> None:
    """Cases whose stop never comes would compare nothing."""
    ends = set()
    for case in CASES:
        for completion in offline(sides, PROMPTS[0], sides.resolve(case.params)).outputs:
            ends.add((completion.finish_reason, type(completion.stop_reason)))
    assert ends >= {("length", type(None)), ("stop", str), ("stop", int)}
