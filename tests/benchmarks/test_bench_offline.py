# SPDX-License-Identifier: Apache-2.0
"""`vllm bench latency` and `throughput` around an engine that answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entrypoints.fake_engine import byte_tokenizer
from vllm import LLM
from vllm.benchmarks import latency, throughput
from vllm.benchmarks.offline import make_llm
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import load_command, main
from vllm.entrypoints.openai.cli_args import DEFAULT_MODEL
from vllm.utils.argparse_utils import FlexibleArgumentParser


class FakeLLM:
    """Keeps what it is asked; every answer has `max_tokens` tokens."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=200, get_vocab_size=lambda: 50)
        self.calls: list[tuple[list[Any], Any]] = []
        self.chats: list[Any] = []
        self.namespace: Any = None

    def make(self, namespace: Any) -> FakeLLM:
        self.namespace = namespace
        return self

    def get_tokenizer(self) -> Any:
        return byte_tokenizer()

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append((prompts, params))
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            SimpleNamespace(
                prompt_token_ids=list(prompt.encode() if isinstance(prompt, str) else [0]),
                outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)] * p.n,
            )
            for prompt, p in zip(prompts, each, strict=True)
        ]

    def beam_search(self, prompts: list[Any], params: Any) -> None:
        self.calls.append((prompts, params))

    def chat(self, chats: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.chats.append(chats)
        return self.generate([chat[0]["content"] for chat in chats], params, use_tqdm)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(latency, "make_llm", fake.make)
    monkeypatch.setattr(throughput, "make_llm", fake.make)
    return fake


def test_latency(llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    flags = ["--input-len", "9", "--output-len", "4", "--batch-size", "3", "--num-iters", "5"]
    flags += ["--num-iters-warmup", "2", "--output-json", str(path), "--disable-detokenize"]
    assert main(["bench", "latency", "--model", "m", "-tp", "1", *flags]) == 0
    assert len(llm.calls) == 7 and llm.namespace.enable_prefix_caching is False
    prompts, params = llm.calls[0]
    assert [len(p["prompt_token_ids"]) for p in prompts] == [9] * 3
    assert max(max(p["prompt_token_ids"]) for p in prompts) < 50
    assert (params.max_tokens, params.ignore_eos, params.detokenize) == (4, True, False)
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 5 and list(result["percentiles"]) == [
        *["10", "25", "50", "75", "90", "99"]
    ]
    shown = capsys.readouterr().out
    assert f"Avg latency: {result['avg_latency']} seconds" in shown
    assert "99% percentile latency:" in shown


@pytest.mark.parametrize("name", ["latency", "throughput", "scaling"])
@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["m"], "m"),
        (["--model", "m"], "m"),
        (["--seed", "1", "m", "--model", "other"], "m"),
        ([], DEFAULT_MODEL),
    ],
)
def test_the_model_is_an_argument_or_a_flag(
    monkeypatch: pytest.MonkeyPatch, name: str, words: list[str], model: str
) -> None:
    started: list[str] = []

    def start(args: EngineArgs) -> None:
        started.append(args.model)

    monkeypatch.setattr(LLM, "from_engine_args", start)
    command = load_command(f"bench {name}")
    parser = FlexibleArgumentParser()
    command.add_arguments(parser)
    make_llm(parser.parse_args(words))
    assert started == [model]


def test_latency_of_beams(llm: FakeLLM) -> None:
    flags = ["--use-beam-search", "--n", "3", "--output-len", "4", "--num-iters", "1"]
    assert main(["bench", "latency", "--model", "m", "--num-iters-warmup", "0", *flags]) == 0
    [(prompts, params)] = llm.calls
    assert (len(prompts), params.beam_width, params.max_tokens) == (8, 3, 4)


@pytest.mark.parametrize("flags", [["--async-engine"], ["--profile"], ["--lora-path", "x"]])
def test_flags_of_other_releases(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--model", "m", *flags]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"vllm bench throughput: error: {flags[0]}") and "instead" in last


def test_latency_figures() -> None:
    result = latency.summarize([3.0, 1.0, 2.0])
    assert result["avg_latency"] == 2.0 and result["latencies"] == [3.0, 1.0, 2.0]
    assert result["percentiles"]["50"] == 2.0 and result["percentiles"]["25"] == 1.5


def test_throughput(llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    flags = ["--num-prompts", "4", "--input-len", "10", "--output-len", "5", "--prefix-len", "2"]
    flags += ["--n", "2", "--num-warmups", "1", "--output-json", str(path)]
    assert main(["bench", "throughput", "--model", "m", *flags]) == 0
    assert [len(prompts) for prompts, _ in llm.calls] == [1, 4] and not llm.chats
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (4, 4 * (12 + 2 * 5))
    rate = result["total_num_tokens"] / result["elapsed_time"]
    assert result["tokens_per_second"] == pytest.approx(rate)
    shown = capsys.readouterr().out
    assert "Throughput: " in shown and "Total num output tokens:  40" in shown


def test_throughput_through_the_chat_template(llm: FakeLLM) -> None:
    flags = ["--backend", "vllm-chat", "--num-prompts", "2", "--input-len", "10"]
    assert main(["bench", "throughput", "--model", "m", *flags]) == 0
    [chats] = llm.chats
    assert len(chats) == 2 and chats[0][0]["role"] == "user"


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_requests_that_do_not_fit(
    llm: FakeLLM, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--input-len", "150", "--output-len", "51", "--model", "m"]
    assert main(["bench", name, *flags]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "150 input and 51 output tokens exceed --max-model-len 200" in last and not llm.calls


def test_sizes_must_be_positive(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--model", "m", "--batch-size", "0"]) == 1
    assert "(--batch-size): input should be greater than 0" in capsys.readouterr().err
