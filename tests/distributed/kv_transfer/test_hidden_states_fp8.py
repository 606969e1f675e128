# SPDX-License-Identifier: Apache-2.0
"""Hidden states stored in eight bits: their error, their files and rings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.hidden_states_fp8 import measure
from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    Harness,
    cache_config,
    extraction_config,
    make_harness,
    row_values,
    strided_cache,
    transfer_config,
)
from tests.distributed.kv_transfer.offload_engines import drain, engine, prompt
from tests.distributed.kv_transfer.offload_engines import run as generate
from tests.distributed.kv_transfer.test_connector_kit import EXTRACTION
from tests.distributed.kv_transfer.test_hidden_states_ring import flip
from tests.tiny_models import tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_ring import RingBroken, RingReader, RingWriter, Rows
from vllm.hidden_states_storage import (
    RowFormat,
    StoredRows,
    dequantize,
    quantize,
    read_hidden_states,
)
from vllm.testing.connectors import CHECKS, ConnectorCase

FP8 = torch.float8_e4m3fn
#: fp32 arithmetic adds to the bound `m / 28` of an element near its row's largest, `m`: with
#: `u = 2^-24`, the scale is off by `2u` of itself, the quotient and the product by `u` of `m` each,
#: which is `(2 + 28 + 28) u` of the bound, and less than that of the others
SLACK = 1 + 60 * 2.0**-24


def assert_bound(exact: Tensor, restored: Tensor) -> None:
    """The error that docs/extraction.md states, of `[..., hidden]`; in float64."""
    info = torch.finfo(restored.dtype)
    error = (restored.double() - exact.double()).abs()
    # Of rounding to the model's dtype: half of the distance between neighbours, which below the
    # smallest normal number is that at it.
    error -= restored.double().abs().clamp(min=info.tiny) * (info.eps / 2)
    largest = exact.double().abs().amax(-1, keepdim=True)
    fine = torch.maximum(exact.double().abs() / 16, largest / 448 / 1024)
    assert (error <= fine * SLACK).all()
    assert (error <= largest / 28 * SLACK).all()


# ---- the format ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
    spread=st.integers(0, 12),
)
@example(dtype=torch.float16, seed=65536, spread=3)  # restores a subnormal float16
def test_the_error_has_a_bound(dtype: torch.dtype, seed: int, spread: int) -> None:
    """Elements over up to `2 ** spread` to each side, rows and columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** (spread * (torch.rand(7, 3, 64, generator=generator) - 0.5))
    rows = (torch.randn(7, 3, 64, generator=generator) * sizes).to(dtype)
    rows[1] /= 64
    rows[:, 2] *= 32
    stored = quantize(rows)
    assert stored.scales is not None
    assert (stored.hidden_states.dtype, stored.scales.dtype) == (FP8, torch.float32)
    assert stored.hidden_states.shape == rows.shape and stored.scales.shape == (7, 3, 1)
    assert torch.equal(stored.hidden_states.float().abs().amax(-1), torch.full((7, 3), 448.0))
    restored = dequantize(stored, dtype)
    assert restored.dtype == dtype
    assert_bound(rows, restored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_is_tight(dtype: torch.dtype) -> None:
    """Of elements between two neighbours in eight bits, a last bit of fp32 to either side."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.rand(2000, generator=generator, dtype=torch.float64) + 1
    between = torch.tensor([272, 304, 400, 432, 6.5 / 512, 7.5 / 512], dtype=torch.float64)
    aside = 1 + torch.arange(-3, 4) * 2.0**-24
    elements = (largest[:, None, None] / 448 * between[:, None] * aside).flatten(1)
    rows = torch.cat([largest[:, None], elements], 1)[:, None].to(dtype)
    restored = dequantize(quantize(rows), dtype)
    assert_bound(rows, restored)
    error = (restored.double() - rows.double()).abs() / rows.double().amax(-1, keepdim=True)
    assert error.max() > (1 + 1e-6) / 28


def test_rows_of_nothing_and_next_to_nothing() -> None:
    rows = torch.zeros(3, 1, 4)
    rows[1] = torch.tensor([1e-37, -1e-38, 0.0, 3e-45])
    rows[2] = 1e-44
    restored = dequantize(quantize(rows), torch.float32)
    assert torch.equal(restored[0], rows[0])
    assert (restored - rows).abs().max() < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    """Only in its own row and column."""
    rows = torch.ones(2, 2, 4)
    rows[1, 0, 2] = bad
    restored = dequantize(quantize(rows), torch.float32)
    assert restored[1, 0].isnan().all()
    restored[1, 0] = 1
    assert torch.equal(restored, torch.ones(2, 2, 4))


def test_sizes_are_those_of_the_tensors() -> None:
    rows = torch.randn(5, COLUMNS, HIDDEN, dtype=torch.bfloat16)
    for storage in ("auto", "fp8_e4m3"):
        row_format = RowFormat(COLUMNS, HIDDEN, torch.bfloat16, storage)
        stored, empty = row_format.store(rows), row_format.empty(5)
        for found in (stored, empty):
            assert sum(t.nbytes for t in found.tensors.values()) == 5 * row_format.row_bytes
        assert row_format.problem(empty, 5) is None and row_format.problem(stored, 5) is None
        assert "for 4 tokens" in str(row_format.problem(stored, 4))
    other = RowFormat(COLUMNS, HIDDEN, torch.float16)
    assert "bfloat16 rows instead of" in str(other.problem(StoredRows(rows), 5))


@pytest.mark.gpu
def test_the_device_makes_the_same_bits() -> None:
    """Only what is stored travels; more than one chunk, and the last block partly."""
    cache = torch.randn(4000, 16, 4, 256, device="cuda").to(torch.bfloat16)
    ids = torch.randperm(4000)[:1001].tolist()
    num_tokens = 1000 * 16 + 3
    stored, event = RowCopier(cache, "fp8_e4m3").copy(ids, num_tokens)
    event.synchronize()
    expected = quantize(cache.cpu()[ids].flatten(0, 1)[:num_tokens])
    assert stored.scales is not None and expected.scales is not None
    assert stored.hidden_states.is_pinned() and stored.scales.is_pinned()
    assert torch.equal(stored.scales, expected.scales)
    found, wanted = stored.hidden_states.view(torch.uint8), expected.hidden_states.view(torch.uint8)
    assert torch.equal(found, wanted)


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_files(tmp_path: Path, num_tokens: int) -> None:
    harness = make_harness(tmp_path, storage_dtype="fp8_e4m3", hs_block_size=3)
    path = harness.run_to_end("r", num_tokens)
    exact = row_values(0, num_tokens)
    data, raw = load_hidden_states(path), load_hidden_states(path, raw=True)
    assert data.keys() == {"hidden_states", "token_ids"}
    assert data["hidden_states"].dtype == exact.dtype
    assert_bound(exact, data["hidden_states"])
    assert raw.keys() == {"hidden_states", "hidden_states_scales", "token_ids"}
    expected = quantize(exact)
    assert raw["hidden_states"].dtype == FP8
    assert torch.equal(raw["hidden_states"].float(), expected.hidden_states.float())
    assert torch.equal(raw["hidden_states_scales"], expected.scales)
    for found in (data, raw):
        assert found["token_ids"].tolist() == [*range(100, 100 + num_tokens)]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["dtype"], metadata["storage_dtype"]) == ("float32", "fp8_e4m3")
    assert "hidden_states_scales float32 [n, columns, 1]" in metadata["scales"]
    harness.worker.shutdown()


def test_files_are_as_before_without_it(tmp_path: Path) -> None:
    """Without the setting the tensors are as they always were, and `raw` is the same."""
    path = make_harness(tmp_path, storage_dtype="auto").run_to_end("r", 20)
    data, raw = load_hidden_states(path), load_hidden_states(path, raw=True)
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"layer_ids"}
    assert data.keys() == raw.keys() == {"hidden_states", "token_ids"}
    assert torch.equal(data["hidden_states"], row_values(0, 20))
    assert torch.equal(raw["hidden_states"], row_values(0, 20))


def test_the_reader_of_speculators_fp8_files_reads_them(tmp_path: Path) -> None:
    """Its scales are of rows, ours of rows and columns; it multiplies with either."""
    transfer = pytest.importorskip("hs_connectors.transfer")
    path = make_harness(tmp_path, storage_dtype="fp8_e4m3").run_to_end("r", 20)
    expected = load_hidden_states(path)["hidden_states"]
    reader = transfer.FP8Transfer(tmp_path, torch.float32)
    data = reader.get_generated({"hidden_states_path": str(path)})  # removes file and lock
    assert torch.equal(data["hidden_states"], expected)


def test_a_format_of_later_versions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"hidden_states": torch.ones(1)}, path, metadata={"storage_dtype": "nvfp4"})
    with pytest.raises(ValueError, match="'nvfp4' is not known"):
        read_hidden_states(path)
    assert read_hidden_states(path, raw=True)["hidden_states"].tolist() == [1]


def test_live_capture(tmp_path: Path) -> None:
    from tests.distributed.kv_transfer.test_live_capture import AGREES, harness, serve

    run = harness(tmp_path, storage_dtype="fp8_e4m3")
    assert serve(run, "r", AGREES)
    run.step()
    run.worker.shutdown()
    [path] = (tmp_path / "hidden_states").iterdir()
    assert load_file(path)["hidden_states"].dtype == FP8
    assert_bound(row_values(0, 21), read_hidden_states(path)["hidden_states"])
    said = json.loads((tmp_path / "capture.json").read_text())
    assert (said["dtype"], said["storage_dtype"]) == ("float32", "fp8_e4m3")
    with pytest.raises(ValueError, match="holds captures of .*fp8_e4m3"):
        harness(tmp_path)


# ---- the ring -----------------------------------------------------------------------------------


def ring_rows(index: int, num_tokens: int) -> Rows:
    stored = quantize(row_values(index, num_tokens))
    return Rows(f"r{index}", torch.arange(num_tokens), stored.hidden_states, stored.scales)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rows")


def test_ring_records_are_sealed_and_checked(path: str) -> None:
    row_format = RowFormat(COLUMNS, HIDDEN, torch.float32, "fp8_e4m3")
    writer = RingWriter(path, 4096, row_format)
    with pytest.raises(ValueError, match="not rows of this ring"):
        writer.put(Rows("r", torch.arange(6), row_values(0, 6)), "wait")
    with RingReader(path) as reader, RingReader(path, raw=True) as raw_reader:
        for i in range(40):  # more than once around the ring
            rows = ring_rows(i, 6 + i % 3)
            writer.put(rows, "wait")
            found = (raw_reader if i % 2 else reader).get(10)
            assert found is not None and found.request_id == f"r{i}"
            if i % 2:
                assert torch.equal(found.hidden_states.float(), rows.hidden_states.float())
                assert found.hidden_states.dtype == FP8
                assert found.scales is not None and rows.scales is not None
                assert torch.equal(found.scales, rows.scales)
            else:
                assert found.scales is None and found.hidden_states.dtype == torch.float32
                assert_bound(row_values(i, 6 + i % 3), found.hidden_states)
        writer.put(ring_rows(0, 5), "wait")
        ring = writer._ring
        flip(path, ring.at(ring.cursors()[1]) + 32 + len("r0") + 5 * 8)  # the first scale
        with pytest.raises(RingBroken, match="was sealed with"):
            reader.get(1)
    writer.close()


def test_a_ring_holds_more_requests(path: str) -> None:
    """A request that does not fit as the model computes it; one that does not fit at all."""
    transfer = transfer_config(
        "RingHiddenStatesConnector", ring_path=path, ring_bytes=4096, storage_dtype="fp8_e4m3"
    )
    harness = Harness(extraction_config(transfer), cache_config())
    harness.add("fits", 90)
    harness.step({"fits": 90})
    harness.sample("fits", 7)
    assert harness.finish("fits")[0]
    with RingReader(path) as reader:
        harness.step()
        rows = reader.get(60)
        assert rows is not None and rows.request_id == "fits"
        assert_bound(row_values(0, 90), rows.hidden_states)
        harness.step()
        request = harness.add("long", 200)
        harness.step({"long": 200})
        harness.sample("long", 7)
        assert harness.finish("long") == (False, None)
        assert "in a ring of 4096" in str(request.error)
        harness.worker.shutdown()


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fp8", "bfloat16", 8, None, ["auto"]])
@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("ExampleHiddenStatesConnector", {}),
        ("RingHiddenStatesConnector", {"ring_path": "/dev/shm/never-made"}),
        ("LiveCaptureConnector", {"shared_storage_path": "/never/made", "capture_rate": 1.0}),
    ],
)
def test_unknown_formats(connector: str, extra: dict[str, Any], value: object) -> None:
    transfer = transfer_config(connector, storage_dtype=value, **extra)
    with pytest.raises(VLLMValidationError, match="storage_dtype .*: choose one of auto, fp8_e4m3"):
        Harness(extraction_config(transfer), cache_config())


def test_a_class_with_an_encoding_of_its_own(tmp_path: Path) -> None:
    transfer = transfer_config(
        "HalfPrecisionConnector", shared_storage_path=tmp_path, storage_dtype="fp8_e4m3"
    )
    transfer.kv_connector_module_path = "tests.distributed.kv_transfer.half_precision_connector"
    with pytest.raises(VLLMValidationError, match="HalfPrecisionConnector encodes rows itself"):
        Harness(extraction_config(transfer), cache_config())


@pytest.mark.parametrize(
    ("connector", "extra"),
    [("OffloadingConnector", {"cpu_bytes_to_use": 2**20}), ("NixlConnector", {})],
)
def test_connectors_that_move_whole_blocks(connector: str, extra: dict[str, Any]) -> None:
    """They keep the bits of all state; their settings have no such key."""
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "storage_dtype": "fp8_e4m3"},
    }
    with pytest.raises(VLLMValidationError, match="storage_dtype"), engine(transfer):
        pass


# ---- engines ------------------------------------------------------------------------------------


def test_the_error_of_an_engines_rows() -> None:
    """The benchmark whose table is in docs/extraction.md, on a tiny model."""
    prompts = [prompt(seed, length) for seed, length in ((1, 60), (2, 33), (3, 1))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        found = measure(
            str(tiny_model("qwen3_5")),
            [0, 2, 4],
            prompts,
            dtype="float32",
            max_model_len=128,
            kv_cache_memory_bytes=16 << 20,
        )
    assert list(found) == [0, 2, 4]
    for errors in found.values():
        assert 0.01 < errors.rms < 0.03 and errors.rms <= errors.max_norm < 1 / 16
        assert errors.rms / 4 < errors.max_element <= SLACK / 28


def test_files_and_ring_have_the_same_bits(tmp_path: Path, path: str) -> None:
    ids = prompt(1, 40)
    found: list[StoredRows] = []
    extras: dict[str, dict[str, Any]] = {
        "ExampleHiddenStatesConnector": {"shared_storage_path": str(tmp_path)},
        "RingHiddenStatesConnector": {"ring_path": path, "ring_bytes": 2**20},
    }
    for name, extra in extras.items():
        transfer = {
            "kv_connector": name,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {**extra, "storage_dtype": "fp8_e4m3"},
        }
        with engine(transfer, speculative_config=EXTRACTION) as llm:
            [output] = generate(llm, ids)
            drain(llm)
            reply = output.kv_transfer_params or {}
            if "hidden_states_path" in reply:
                data = load_hidden_states(reply["hidden_states_path"], raw=True)
                found.append(StoredRows(data["hidden_states"], data["hidden_states_scales"]))
                continue
            with RingReader(path, raw=True) as reader:
                rows = reader.get(60)
            assert rows is not None and rows.token_ids.tolist() == ids
            found.append(StoredRows(rows.hidden_states, rows.scales))
    of_file, of_ring = found
    assert of_file.scales is not None and of_ring.scales is not None
    assert torch.equal(of_file.scales, of_ring.scales)
    assert torch.equal(of_file.hidden_states.float(), of_ring.hidden_states.float())


def test_passes_the_kit(tmp_path: Path) -> None:
    config = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_connector_extra_config": {
            "shared_storage_path": "{storage}",
            "storage_dtype": "fp8_e4m3",
        },
    }
    options = {"speculative_config": json.loads(json.dumps(EXTRACTION))}
    case = ConnectorCase(config, ("hybrid_rows",), loads=False, options=options)
    for check in ("exact-bits", "abort", "shutdown"):
        CHECKS[check](case, "hybrid_rows", tmp_path / check)


@settings(max_examples=30, deadline=None)
@given(block_size=st.integers(1, 5), num_tokens=st.integers(0, 30), data=st.data())
def test_copies_of_any_blocks(block_size: int, num_tokens: int, data: st.DataObject) -> None:
    cache = strided_cache(40, block_size, 2, 8)
    cache[:] = torch.randn(cache.shape)
    ids = data.draw(st.permutations(range(40)))[: -(-num_tokens // block_size)]
    stored, event = RowCopier(cache, "fp8_e4m3").copy(ids, num_tokens)
    expected = quantize(cache[ids].flatten(0, 1)[:num_tokens])
    assert event.query() and stored.scales is not None and expected.scales is not None
    assert torch.equal(stored.scales, expected.scales)
    assert torch.equal(stored.hidden_states.float(), expected.hidden_states.float())
