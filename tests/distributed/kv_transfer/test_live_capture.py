# SPDX-License-Identifier: Apache-2.0
"""Live capture: who is captured, what is dropped, what is on disk; by its flag, in an engine."""

from __future__ import annotations

import json
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from safetensors.torch import load_file

from tests.apriel2_models import make_tensors, save, stochastic
from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    Harness,
    cache_config,
    extraction_config,
    row_values,
    transfer_config,
)
from tests.tiny_models import hf_residual_streams, tiny_model
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import live_saving
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.live_saving import (
    LiveCapturePromMetrics,
    LiveCaptureStats,
    LiveDataset,
)
from vllm.distributed.kv_transfer.kv_connector.v1.live_capture_connector import (
    LiveCaptureConnector,
    is_sampled,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.request import RequestStatus

AGREES = {"capture": True}
ROW_BYTES = COLUMNS * HIDDEN * 4 + 8


def harness(path: Path, **settings: Any) -> Harness:
    extra = {"shared_storage_path": str(path), "capture_rate": 1.0, **settings}
    transfer = transfer_config("LiveCaptureConnector", **extra)
    return Harness(extraction_config(transfer), cache_config())


def serve(run: Harness, req_id: str, params: dict[str, Any] | None, num_prompt: int = 20) -> bool:
    """A request with two tokens of output; whether its blocks were kept after its end."""
    run.add(req_id, num_prompt, params)
    run.step({req_id: num_prompt})
    run.sample(req_id, 7)
    run.step({req_id: 1})
    run.sample(req_id, 8)
    return run.finish(req_id)[0]


def stats(run: Harness) -> dict[str, int]:
    found = run.worker.get_kv_connector_stats()
    return {} if found is None else found.data


def lines(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]


def test_only_requests_that_agree_are_captured(tmp_path: Path) -> None:
    run = harness(tmp_path)
    assert not serve(run, "silent", None)
    assert not serve(run, "refuses", {"capture": False})
    assert serve(run, "agrees", AGREES)
    assert run.step() == {"agrees"}
    run.worker.shutdown()
    [file] = (tmp_path / "hidden_states").iterdir()
    stored = load_file(file)
    assert file.name == "hs_0.safetensors" and lines(tmp_path) == [{"num_prompt": 20}]
    assert torch.equal(stored["hidden_states"], row_values(2, 21)), "the last token has no row"
    assert stored["token_ids"].tolist() == [*range(100, 120), 7]
    said = json.loads((tmp_path / "capture.json").read_text())
    assert (said["layers"], said["dtype"]) == ([0, 1, 2], "float32")


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_requests_that_ended_badly_are_not(tmp_path: Path, status: RequestStatus) -> None:
    run = harness(tmp_path)
    run.add("a", 20, AGREES)
    run.step({"a": 20})
    run.sample("a", 7)
    assert not run.finish("a", status)[0]
    run.step()
    assert stats(run) == {}
    run.worker.shutdown()


def test_the_rate_is_a_share_of_the_ids() -> None:
    ids = [f"cmpl-{n}" for n in range(4000)]
    assert 900 < sum(is_sampled(i, 0.25) for i in ids) < 1100
    assert all(is_sampled(i, 1.0) for i in ids)
    assert all(is_sampled(i, 0.5) for i in ids if is_sampled(i, 0.25))


def test_requests_outside_the_rate_are_not_captured(tmp_path: Path) -> None:
    run = harness(tmp_path, capture_rate=0.5)
    names = [f"r{n}" for n in range(8)]
    kept = [name for name in names if serve(run, name, AGREES, num_prompt=4)]
    assert kept == [name for name in names if is_sampled(name, 0.5)] and 0 < len(kept) < 8
    run.step()
    run.worker.shutdown()
    assert len(lines(tmp_path)) == len(kept)


def test_a_full_budget_drops(tmp_path: Path) -> None:
    one = 4096 + 21 * ROW_BYTES
    run = harness(tmp_path, capture_bytes=2 * one)
    for n in range(3):
        assert serve(run, f"r{n}", AGREES)
        assert run.step() == {f"r{n}"}, "dropped or not, the blocks are free again"
    assert stats(run) == {"samples": 2, "bytes": 2 * one, "dropped_budget": 1}
    assert stats(run) == {}, "each count is told once"
    run.worker.shutdown()
    assert len(lines(tmp_path)) == 2
    # What is there counts in the next run.
    again = harness(tmp_path, capture_bytes=one)
    assert serve(again, "r4", AGREES)
    again.step()
    assert stats(again) == {"dropped_budget": 1}
    again.worker.shutdown()


def test_busy_writers_drop_and_delay_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness(tmp_path, num_writer_threads=1)
    go_on = threading.Event()
    assert isinstance(run.worker, LiveCaptureConnector) and run.worker._saver is not None
    dataset = run.worker._saver._dataset
    add = dataset.add
    monkeypatch.setattr(dataset, "add", lambda *args: (go_on.wait(60), add(*args)))
    for n in range(4):
        serve(run, f"r{n}", AGREES)
        assert run.step() == {f"r{n}"}, "the step waits for no writer"
    found = stats(run)
    assert (found["samples"], found["dropped_busy"]) == (2, 2)
    go_on.set()
    run.worker.shutdown()
    assert len(lines(tmp_path)) == 2


def test_a_failing_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = harness(tmp_path)
    assert isinstance(run.worker, LiveCaptureConnector) and run.worker._saver is not None
    live = run.worker._saver

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live._dataset, "add", full)
    serve(run, "a", AGREES)
    run.step()
    live._executor.shutdown()
    assert stats(run)["dropped_failed"] == 1 and live._promised == 0


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    for n in range(2):
        run = harness(tmp_path)
        serve(run, f"r{n}", AGREES, num_prompt=4 + n)
        run.step()
        run.worker.shutdown()
        # What a killed server leaves: a torn line, and a file without one.
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write('{"num_pro')
        (tmp_path / "hidden_states" / f"hs_{n + 1}.safetensors").write_bytes(b"torn")
        (tmp_path / "hidden_states" / f".{n}.partial").write_bytes(b"torn")
    run = harness(tmp_path)
    serve(run, "r2", AGREES, num_prompt=6)
    run.step()
    run.worker.shutdown()
    assert lines(tmp_path) == [{"num_prompt": n} for n in (4, 5, 6)]
    assert [
        len(load_file(tmp_path / "hidden_states" / f"hs_{n}.safetensors")["token_ids"])
        for n in range(3)
    ] == [5, 6, 7]
    assert len(list((tmp_path / "hidden_states").iterdir())) == 3


def test_a_line_that_is_cut_off_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes what its last block has room for; the next line must not go on with it."""
    tensors = {"hidden_states": torch.ones(1, 1, 1), "token_ids": torch.ones(1, dtype=torch.int64)}
    dataset = LiveDataset(tmp_path, {})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(live_saving.tensor_file, "write", lambda path, *_: Path(path).touch())
    dataset.add(tensors, 1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, limit[1]))
    try:
        with pytest.raises(OSError, match="No space left|too large"):
            dataset.add(tensors, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    dataset.add(tensors, 3)
    dataset.close()
    assert lines(tmp_path) == [{"num_prompt": 1}, {"num_prompt": 3}]


def test_samples_are_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = ["old"]
    monkeypatch.setattr(LiveCaptureConnector, "_source_now", lambda connector: {"weights": [*now]})
    run = harness(tmp_path)
    assert serve(run, "before", AGREES)
    run.step()
    run.scheduler.reset_cache()
    assert serve(run, "reset", AGREES)
    run.step()
    now[:] = ["new"]
    run.scheduler.reset_cache()
    assert not serve(run, "after", AGREES)
    run.step()
    run.worker.shutdown()
    assert len(lines(tmp_path)) == 2
    with pytest.raises(ValueError, match="holds captures of .*'old'.*, not .*'new'"):
        harness(tmp_path)
    said = tmp_path / "capture.json"
    earlier = json.loads(said.read_text())
    del earlier["weights"]
    said.write_text(json.dumps(earlier))
    harness(tmp_path).worker.shutdown()


def test_samples_are_of_one_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is spelled; while the engine has another one nothing is captured."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    decoder = stochastic(2)
    settings: dict[str, Any] = {
        "model": str(save(tmp_path / "model", decoder, make_tensors(decoder))),
        "dtype": "float32",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**22,
        "capture_live": 1.0,
        "capture_live_path": str(tmp_path / "live"),
    }
    params = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": AGREES})
    prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
    llm = LLM(**settings, placement="all-gdn")
    for placement in (None, "all-kda", ["gdn", "gdn"]):
        if placement is not None:
            llm.change_placement(placement)
        llm.generate([prompt], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert len(lines(tmp_path / "live")) == 2
    with pytest.raises(VLLMValidationError, match="holds captures of .*'gdn,gdn'.*, not .*'atten"):
        LLM(**settings)


def test_a_directory_has_one_server_and_one_content(tmp_path: Path) -> None:
    run = harness(tmp_path)
    with pytest.raises(ValueError, match="another server captures into"):
        harness(tmp_path)
    run.worker.shutdown()
    said = tmp_path / "capture.json"
    said.write_text(said.read_text().replace("float32", "bfloat16"))
    with pytest.raises(ValueError, match="holds captures of .*bfloat16"):
        harness(tmp_path)
    said.unlink()
    (tmp_path / "hidden_states" / "hs_0.safetensors").touch()
    with pytest.raises(ValueError, match="hs_0.safetensors is no server's capture"):
        harness(tmp_path)


def test_a_directory_that_cannot_be_written_is_named() -> None:
    message = "--capture-live-path /dev/null/x: the dataset cannot be written: Not a directory"
    with pytest.raises(VLLMValidationError, match=message):
        harness(Path("/dev/null/x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capture_rate": 0}, "above 0 and at most 1"),
        ({"capture_rate": "all"}, "above 0 and at most 1"),
        ({"capture_bytes": 0}, "positive number of bytes"),
        ({"shared_storage_path": ""}, "needs shared_storage_path"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness(tmp_path, **settings)


def test_consent_is_yes_or_no() -> None:
    transfer = transfer_config("LiveCaptureConnector")
    LiveCaptureConnector.check_request(transfer, {"capture": False}, 1)
    with pytest.raises(ValueError, match="capture must be true or false"):
        LiveCaptureConnector.check_request(transfer, {"capture": "yes"}, 1)


def test_metrics() -> None:
    registry = CollectorRegistry()

    def maker(kind: Any) -> Any:
        return lambda name, text, labels: kind(name, text, labels, registry=registry)

    types = {kind: maker(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = LiveCapturePromMetrics(VllmConfig(), types, ["engine"], {0: ["0"]})
    taken = LiveCaptureStats()
    taken.take(100)
    taken.drop("busy")
    metrics.observe(taken.aggregate(taken.__class__({"samples": 2})).data, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:live_capture_{name}_total", {"engine": "0", **labels}
        )

    assert (value("samples"), value("bytes")) == (3, 100)
    assert (value("dropped", reason="busy"), value("dropped", reason="budget")) == (1, 0)


# ---- the flag ------------------------------------------------------------------------------------


def config_of(path: Path | None, **fields: Any) -> Any:
    fields = {"capture_live": 0.5, "capture_live_path": path and str(path), **fields}
    return EngineArgs(
        model=str(tiny_model("llama")), dtype="float32", **fields
    ).create_engine_config()


def test_the_flag_is_a_connector_and_extraction(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    config = config_of(tmp_path, speculative_config=ngram, capture_live_bytes=1000)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert config.kv_transfer_config.kv_connector == "LiveCaptureConnector"
    assert (extra["capture_rate"], extra["capture_bytes"]) == (0.5, 1000)
    assert config.speculative_config.extraction_layer_ids == [1, 2, 4]
    assert config.tokens_to_verify == 4, "the drafter goes on beside it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capture_live_path": None}, "go together"),
        ({"kv_offloading_size": 1.0}, "OffloadingConnector .* both need a connector"),
        (
            {
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {
                        "hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}
                    },
                }
            },
            "extracts hidden states itself",
        ),
    ],
)
def test_flags_that_do_not_go_with_it(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        config_of(tmp_path, **fields)


def test_an_engine_captures_what_the_model_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = tiny_model("llama")
    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=2**25,
        capture_live=1.0,
        capture_live_path=str(tmp_path),
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=9,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"capture": agrees}},
        )
        for agrees in (True, False)
    ]
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    prompts = [TokensPrompt(prompt_token_ids=prompt)] * 2
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert [output.kv_transfer_params for output in outputs] == [None, None]
    assert lines(tmp_path) == [{"num_prompt": len(prompt)}]
    stored = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")
    token_ids = [*prompt, *outputs[0].outputs[0].token_ids[:-1]]
    assert stored["token_ids"].tolist() == token_ids
    streams = hf_residual_streams(model, token_ids)
    layers = json.loads((tmp_path / "capture.json").read_text())["layers"]
    expected = torch.stack([streams[i] for i in layers], dim=1)
    torch.testing.assert_close(stored["hidden_states"], expected, rtol=1e-4, atol=1e-4)
