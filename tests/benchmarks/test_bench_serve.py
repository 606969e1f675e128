# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` against a server with a fake engine, over TCP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_tokenizer
from tests.ports import free_port
from vllm.benchmarks import client_usage, plot
from vllm.benchmarks.outcome import Outcome
from vllm.benchmarks.serve_args import ServeArgs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.slow


class Served:
    """A running server, its engine and what the benchmark's flags must be to reach it."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeAsyncLLM()
        byte_tokenizer().save_pretrained(folder)
        self.port = free_port()
        self.flags = ["--port", str(self.port), "--tokenizer", str(folder), "--disable-tqdm"]

    def bench(self, *flags: str) -> int:
        return main(["bench", "serve", *self.flags, *flags])

    @property
    def bodies(self) -> list[Any]:
        return [call.params for call in self.engine.calls]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("tokenizer"))
    app = build_app(served.engine, FrontEndArgs())  # type: ignore[arg-type]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=served.port, log_level="error")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    yield served
    server.should_exit = True
    thread.join()


@pytest.fixture
def served(running: Served) -> Served:
    running.engine.calls.clear()
    running.engine.fail_after = None
    return running


SMALL = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "6"]
READY = ["--ready-check-timeout-sec", "60"]


def test_a_run_is_printed_and_saved(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        served.bench(
            *[*SMALL, *READY, "--request-rate", "1000", "--max-concurrency", "2", "--ignore-eos"],
            *["--num-warmups", "3", "--goodput", "e2el:1e9", "--save-result", "--save-detailed"],
            *["--result-dir", str(tmp_path), "--result-filename", "r.json"],
            *["--metadata", "gpu=none", "--label", "mine"],
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "Successful requests:                     6" in shown and "Mean ITL (ms):" in shown
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 36)
    assert result["model_id"] == "fake" and result["gpu"] == "none" and result["label"] == "mine"
    assert result["request_rate"] == 1000 and 1 <= result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["output_lens"] == [6] * 6 and result["errors"] == [""] * 6
    assert all(len(itl) == 5 for itl in result["itls"])
    assert all(start >= 0 for start in result["start_times"])
    assert result["client_processes"] == len(result["client_cpu_s"]) == 1
    assert 0 < result["client_max_busy"] < 5 and isinstance(result["client_limited"], bool)
    assert "Client processes:                        1" in shown
    # One check, three warm-ups, six that count.
    assert len(served.engine.calls) == 10
    assert all(p.ignore_eos and p.temperature == 0 and p.max_tokens == 6 for p in served.bodies)
    assert {len(call.prompt["prompt_token_ids"]) for call in served.engine.calls} == {20}


def test_chat_backend_and_generated_name(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--backend", "openai-chat", "--append-result", "--temperature", "0.5"]
    flags += ["--extra-body", '{"seed": 7}', *READY]
    assert served.bench(*SMALL, *flags) == 0
    assert {(p.temperature, p.seed) for p in served.bodies} == {(0.5, 7)}
    [path] = tmp_path.glob("openai-chat-infqps-fake-*.json")
    [line, rest] = path.read_text().split("\n")
    assert rest == ""
    result = json.loads(line)
    assert result["completed"] == 6 and result["output_throughput"] > 0
    # The chat template's tokens are the server's to count.
    assert result["total_input_tokens"] > 6 * 20


def test_failed_requests_are_counted_and_named(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.engine.fail_after = 2
    assert served.bench(*SMALL, "--percentile-metrics", "ttft") == 1
    shown = capsys.readouterr().out
    assert "Failed requests:                         6" in shown
    assert "6 failed: ServerError:" in shown and "core killed" in shown and "ITL" not in shown


def test_clients_in_several_processes_are_one_load(served: Served, tmp_path: Path) -> None:
    flags = ["--client-processes", "3", "--max-concurrency", "4", "--request-id-prefix", "r"]
    path = tmp_path / "r.json"
    saved = ["--save-detailed", "--result-filename", str(path)]
    assert served.bench(*SMALL, *READY, *flags, *saved) == 0
    result = json.loads(path.read_text())
    assert result["client_processes"] == len(result["client_wall_s"]) == 3
    assert (result["completed"], result["total_output_tokens"]) == (6, 36)
    asked = [call.prompt["prompt_token_ids"] for call in served.engine.calls[1:]]
    served.engine.calls.clear()
    assert served.bench(*SMALL, "--client-processes", "1") == 0
    # The seed decides the requests, not the number of processes.
    alone = [call.prompt["prompt_token_ids"] for call in served.engine.calls]
    assert sorted(asked) == sorted(alone)
    assert served.bench(*SMALL, *flags[:1], "7") == 1


def test_busy_clients_are_no_result_of_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "r.json"
    saved = ["--save-result", "--result-filename", str(path)]
    monkeypatch.setattr(client_usage, "BUSY_LIMIT", 1e9)
    assert served.bench(*SMALL, *saved, "--fail-on-busy-client") == 0
    assert "NOT A RESULT" not in capsys.readouterr().out
    assert json.loads(path.read_text())["client_limited"] is False
    monkeypatch.setattr(client_usage, "BUSY_LIMIT", 0.0)
    assert served.bench(*SMALL, *saved) == 0
    assert "NOT A RESULT OF THE SERVER: a client process was busy" in capsys.readouterr().out
    assert json.loads(path.read_text())["client_limited"] is True
    assert served.bench(*SMALL, "--fail-on-busy-client") == 3
    capsys.readouterr()
    assert served.bench(*SMALL, "--port", str(free_port()), "--model", "m") == 1
    shown = capsys.readouterr().out
    assert "failed: " in shown and "NOT A RESULT" not in shown, "of no server at all"


def test_a_proxy_of_the_environment_is_not_used(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with caplog.at_level("WARNING"):
        assert served.bench(*SMALL) == 0
    assert "names the proxy http://127.0.0.1:9" in caplog.text


def test_custom_prompts_need_no_tokenizer(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "abc", "output_tokens": 3}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2"]
    url = f"http://127.0.0.1:{served.port}/"
    assert main(["bench", "serve", "--base-url", url, *flags, *READY]) == 0
    assert [call.prompt["prompt"] for call in served.engine.calls[-2:]] == ["abc", "abc"]


def test_plot(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    assert served.bench(*SMALL, *READY, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_of_drafts_has_a_bar_per_position() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axis = figure.subplots()
    plot.plot_acceptance(axis, [0.75, 0.5, 0.25])
    assert [bar.get_height() for bar in axis.patches] == [0.75, 0.5, 0.25]
    assert [text.get_text() for text in axis.texts] == ["0.75", "0.50", "0.25"]
    assert "2.50 tokens per step" in axis.get_title()


def test_plot_shows_drafts_where_there_were_any(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = Outcome(start=0.0, prompt_len=1, ttft=0.1, itl=[0.1], latency=0.2, output_len=2)
    heights = []
    for acceptance in (None, [0.5]):
        path = tmp_path / "p.png"
        plot.plot(str(path), [done], "title", acceptance)
        heights.append(int.from_bytes(path.read_bytes()[20:24]))
    assert heights[1] > heights[0], "a row for the drafts"


def test_plot_without_matplotlib_fails_before_the_load(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert served.bench(*SMALL, "--plot", "p.png") == 1
    assert "pip install 'vllm[plot]'" in capsys.readouterr().err
    assert not served.engine.calls


def test_profiling_needs_a_server_that_profiles(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.bench(*SMALL, *READY, "--profile") == 1
    assert "--profile: POST /start_profile answered" in capsys.readouterr().err


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "9"]) == 1
    last = capsys.readouterr().err.strip().splitlines()
    assert last == [last[-1]] and "cannot reach http://127.0.0.1:9/v1/models" in last[-1]
    assert main(["bench", "serve", "--port", "9", "--model", str(tmp_path)]) == 1
    assert "name one with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"goodput": ["itl:3"]}, "unknown metric 'itl'"),
        ({"goodput": ["ttft=3"]}, "expected KEY:VALUE"),
        ({"goodput": ["ttft:x"]}, "'x' is no number"),
        ({"metric_percentiles": "101"}, r"\[0, 100\]"),
        ({"metric_percentiles": "a"}, r"\[0, 100\]"),
        ({"percentile_metrics": "ttft,xyz"}, "unknown metric 'xyz'"),
        ({"metadata": ["x"]}, "--metadata: expected KEY=VALUE"),
        ({"header": ["=x"]}, "--header: expected KEY=VALUE"),
        ({"header": ["a=x\r\nb: y"]}, "--header a: expected printable"),
        ({"client_processes": 0}, "client_processes|client-processes"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"ramp_up_strategy": "linear"}, "--ramp-up"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"backend": "hf"}, "backend"),
    ],
)
def test_flags_are_checked_before_the_load(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        ServeArgs(**fields)


def test_urls_and_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    args = ServeArgs(host="::1", port=1, backend="openai-chat", logprobs=2, header=["A=b=c"])
    assert args.endpoint_url() == "http://[::1]:1/v1/chat/completions"
    assert args.headers() == {"Authorization": "Bearer k", "A": "b=c"}
    assert args.body() == {"temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    args = ServeArgs(base_url="https://x/api/", endpoint="v2/go", temperature=None)
    assert args.endpoint_url() == "https://x/api/v2/go" and args.body() == {}
