# SPDX-License-Identifier: Apache-2.0
"""lm-eval and guidellm, unmodified: in process, over HTTP, and against transformers."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.remote_server import RemoteServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forking"),
]

TASKS = Path(__file__).parent / "lm_eval_tasks"
MODEL = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3_5-code")
MAX_MODEL_LEN = 512
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "code_choice.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{prompt}}",
}
#: scored by loglikelihoods; the options are short, so lengths matter to acc_norm
CHOICE: dict[str, Any] = {
    **COMMON,
    "task": "code_choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITE: dict[str, Any] = {
    **COMMON,
    "task": "code_write",
    "output_type": "generate_until",
    "doc_to_target": "",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteServer]:
    """The shipped hybrid checkpoint; nothing is looked up on the network."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.1")
        patch.setenv("GUIDELLM__MAX_WORKER_PROCESSES", "1")
        flags = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
        with RemoteServer(MODEL, *flags) as running:
            yield running


class Evaluation:
    """`lm_eval.simple_evaluate` with each way of running the same model."""

    def __init__(self, url: str) -> None:
        local = {"pretrained": MODEL, "dtype": "float32"}
        remote = {"model": MODEL, "num_concurrent": 2, "max_retries": 1}
        self._ways: dict[str, dict[str, Any]] = {
            "vllm": {**local, "max_model_len": MAX_MODEL_LEN, "enforce_eager": True},
            "hf": {**local, "device": "cpu"},
            "local-completions": {**remote, "base_url": f"{url}/v1/completions"},
            "local-chat-completions": {**remote, "base_url": f"{url}/v1/chat/completions"},
        }

    @functools.cache  # noqa: B019
    def run(self, way: str, chat: bool = False) -> dict[str, Any]:
        """Metrics and answers of both tasks; a chat API cannot score."""
        lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

        tasks = [WRITE] if chat else [CHOICE, WRITE]
        found = lm_eval.simple_evaluate(
            model=way,
            model_args=self._ways[way],
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            apply_chat_template=chat,
            batch_size=1 if way != "vllm" else "auto",
        )
        samples = {
            name: [s["filtered_resps"] for s in sorted(rows, key=lambda s: s["doc_id"])]
            for name, rows in found["samples"].items()
        }
        return {"results": found["results"], **samples}


@pytest.fixture(scope="module")
def evaluation(server: RemoteServer) -> Evaluation:
    return Evaluation(server.url)


@pytest.mark.parametrize("way", ["vllm", "local-completions"])
def test_lm_eval_scores_as_with_transformers(evaluation: Evaluation, way: str) -> None:
    expected, got = evaluation.run("hf"), evaluation.run(way)
    for metric in ("acc,none", "acc_norm,none"):
        value = got["results"]["code_choice"][metric]
        assert value == expected["results"]["code_choice"][metric]
        assert 0.5 < value <= 1, "the model knows some Python"
    for ours, theirs in zip(got["code_choice"], expected["code_choice"], strict=True):
        for (logprob, greedy), (reference, is_greedy) in zip(ours, theirs, strict=True):
            assert float(logprob) == pytest.approx(float(reference), abs=1e-4)
            assert greedy == is_greedy


@pytest.mark.parametrize("way", ["vllm", "local-completions"])
def test_lm_eval_generates_as_with_transformers(evaluation: Evaluation, way: str) -> None:
    expected = evaluation.run("hf")["code_write"]
    assert evaluation.run(way)["code_write"] == expected
    assert any(text for (text,) in expected)


def test_lm_eval_chats(evaluation: Evaluation) -> None:
    over_http = evaluation.run("local-chat-completions", chat=True)["code_write"]
    assert over_http == evaluation.run("hf", chat=True)["code_write"]
    assert over_http != evaluation.run("hf")["code_write"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures(server: RemoteServer, tmp_path: Path, route: str) -> None:
    pytest.importorskip("guidellm", reason="guidellm is not installed")
    report = guidellm(
        tmp_path, f"kind=openai_http,target={server.url},model={MODEL},request_format={route}"
    )
    check_report(report, text_tokens_are_exact=route == "/v1/completions")


@pytest.mark.parametrize("kind", ["vllm_python", "vllm_python_batch"])
def test_guidellm_runs_the_engine_itself(
    server: RemoteServer, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("guidellm", reason="guidellm is not installed")
    if kind == "vllm_python_batch":
        # The other kind starts an engine process; once is enough.
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = f"vllm_config.dtype=float32,vllm_config.max_model_len={MAX_MODEL_LEN}"
    report = guidellm(tmp_path, f"kind={kind},model={MODEL},{engine}")
    check_report(report, text_tokens_are_exact=False)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_documented_curl_commands(server: RemoteServer) -> None:
    pages = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\n(curl .*?)```", pages, re.DOTALL)
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            command.replace("http://localhost:8000", server.url),
            shell=True,
            env={**os.environ, "MODEL": MODEL},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        if '"stream": true' in command:
            assert done.stdout.rstrip().endswith("data: [DONE]")
            assert '"usage":{"prompt_tokens"' in done.stdout
        else:
            reply = json.loads(done.stdout)
            assert reply["object"] in ("list", "text_completion"), reply


def guidellm(directory: Path, backend: str) -> Any:
    """The JSON report of six requests of 32 tokens in and 8 out, two at a time.

    Its command runs in this process, which has most of what it imports; its workers do not.
    """
    from guidellm.__main__ import cli  # type: ignore[import-not-found]

    cli.main(
        ["run", "--backend", backend]
        + ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
        + ["--tokenizer", f"kind=hf_auto,model={MODEL}", "--disable-progress"]
        + ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        + ["--output", f"kind=json,path={directory}/"],
        standalone_mode=False,
    )
    (report,) = directory.glob("*.json")
    return json.loads(report.read_text())


def check_report(report: Any, text_tokens_are_exact: bool) -> None:
    (benchmark,) = report["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    for request in requests["successful"]:
        assert request["output_tokens"] == 8, "ignore_eos and max_tokens are honoured"
        assert request["prompt_tokens"] == 32 or not text_tokens_are_exact
