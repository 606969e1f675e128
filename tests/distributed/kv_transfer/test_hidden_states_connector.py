# SPDX-License-Identifier: Apache-2.0
"""`ExampleHiddenStatesConnector` from first step to file, on CPU tensors."""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    HS_LAYER,
    Harness,
    cache_config,
    extraction_config,
    hs_spec,
    make_harness,
    row_values,
    strided_cache,
    transfer_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import connector
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.connector import (
    find_hidden_states_group,
)
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus


def lock_is_held(path: Path | str) -> bool:
    fd = os.open(f"{path}.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_as_reader_b(path: Path, timeout_s: float = 60.0) -> dict[str, torch.Tensor]:
    """The other reader of the protocol: polls for the exclusive lock, then removes its file."""
    lock = Path(f"{path}.lock")
    if lock.exists():
        fd = os.open(lock, os.O_RDWR)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "the lock was never released"
                time.sleep(0.01)
        os.close(fd)
        lock.unlink()
    return load_file(path)


def check_file(path: Path, index: int, num_tokens: int) -> None:
    data = module.load_hidden_states(path)
    assert set(data) == {"hidden_states", "token_ids"}
    assert torch.equal(data["hidden_states"], row_values(index, num_tokens))
    assert data["hidden_states"].dtype == torch.float32
    assert data["token_ids"].dtype == torch.int64
    assert data["token_ids"][:5].tolist() == list(range(100, 100 + num_tokens))[:5]
    assert len(data["token_ids"]) == num_tokens


@pytest.mark.parametrize("attention, hs", [(16, 16), (16, 3), (16, 1), (3, 16), (16, 7)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40])
def test_rows_whatever_the_block_sizes(
    tmp_path: Path, attention: int, hs: int, num_tokens: int
) -> None:
    harness = make_harness(tmp_path, attention_block_size=attention, hs_block_size=hs)
    path = harness.run_to_end("r", num_tokens)
    assert path == tmp_path / "r.safetensors"
    check_file(path, 0, num_tokens)
    harness.worker.shutdown()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.safetensors", "r.safetensors.lock"]


def test_chunks_and_neighbours(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hs_block_size=3)
    harness.add("a", 23)
    harness.add("b", 9)
    harness.step({"a": 10})
    harness.step({"a": 8, "b": 9})
    harness.step({"a": 5})
    for name in ("a", "b"):
        harness.sample(name, 7)
        assert harness.finish(name)[0]
    assert harness.step() == {"a", "b"}
    check_file(tmp_path / "a.safetensors", 0, 23)
    check_file(tmp_path / "b.safetensors", 1, 9)


def test_extra_decode_step_in_flight_adds_no_row(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    harness.add("r", 16)
    harness.step({"r": 16})
    harness.step({"r": 1})
    harness.sample("r", 7)
    assert harness.finish("r")[0]
    harness.step()
    check_file(tmp_path / "r.safetensors", 0, 16)


def test_output_tokens_on_request(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    harness.add("r", 5, {"include_output_tokens": True})
    harness.step({"r": 5})
    for token in (7, 8):
        harness.sample("r", token)
        harness.step({"r": 1})
    harness.sample("r", 9)
    assert harness.finish("r")[0]
    harness.step()
    data = module.load_hidden_states(tmp_path / "r.safetensors")
    assert data["token_ids"].tolist() == [100, 101, 102, 103, 104, 7, 8]
    assert torch.equal(data["hidden_states"], row_values(0, 7))


def test_preempted_request_is_recomputed_into_other_blocks(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hs_block_size=3)
    request = harness.add("r", 10)
    harness.step({"r": 6})
    live = harness.live["r"]
    harness._release("r")
    request.num_computed_tokens = 0
    live.block_ids = tuple([] for _ in live.block_ids)
    harness.free[-1].pop()
    assert lock_is_held(tmp_path / "r.safetensors")
    harness.step({"r": 10})
    harness.sample("r", 7)
    harness.finish("r")
    harness.step()
    check_file(tmp_path / "r.safetensors", 0, 10)


def test_lock_exists_and_is_held_before_any_reply(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    harness.add("r", 4)
    harness.step({"r": 2})
    path = tmp_path / "r.safetensors"
    assert lock_is_held(path) and not path.exists()
    assert oct(os.stat(f"{path}.lock").st_mode & 0o777) == "0o644"
    harness.step({"r": 2})
    harness.sample("r", 7)
    harness.finish("r")
    assert lock_is_held(path)


def test_readers_wait_for_the_data(tmp_path: Path) -> None:
    """Both readers start while the request still runs and get the complete file."""
    harness = make_harness(tmp_path)
    for name in ("a", "b"):
        harness.add(name, 20)
    harness.step({"a": 20, "b": 20})
    results: dict[str, dict[str, torch.Tensor]] = {}
    readers = {"a": module.load_hidden_states, "b": read_as_reader_b}
    threads = [
        threading.Thread(
            target=lambda n=name, f=read: results.update({n: f(tmp_path / f"{n}.safetensors")})
        )
        for name, read in readers.items()
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not results
    for name in ("a", "b"):
        harness.sample(name, 7)
        harness.finish(name)
    harness.step()
    for thread in threads:
        thread.join(timeout=60)
    assert torch.equal(results["a"]["hidden_states"], row_values(0, 20))
    assert torch.equal(results["b"]["hidden_states"], row_values(1, 20))
    assert not Path(f"{tmp_path}/b.safetensors.lock").exists()


def test_cleanup(tmp_path: Path) -> None:
    path = make_harness(tmp_path).run_to_end("r", 4)
    module.load_hidden_states(str(path))
    module.cleanup_hidden_states(path, keep_hidden_states=True)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    with pytest.raises(FileNotFoundError, match="no lock file"):
        module.load_hidden_states(path)
    module.cleanup_hidden_states(path)
    module.cleanup_hidden_states(path)
    assert not list(tmp_path.iterdir())


def test_without_locks(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, use_synchronization_lock=False)
    path = harness.run_to_end("r", 20)
    harness.worker.shutdown()
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    assert torch.equal(load_file(path)["hidden_states"], row_values(0, 20))


def test_custom_path_only_when_allowed(tmp_path: Path) -> None:
    custom = tmp_path / "s" / "deep" / "er" / "x.safetensors"
    allowed = make_harness(tmp_path / "s", allow_custom_save_path=True)
    allowed.add("r", 4, {"hidden_states_path": str(custom)})
    allowed.step({"r": 4})
    allowed.sample("r", 7)
    assert allowed.finish("r") == (True, {"hidden_states_path": str(custom)})
    allowed.step()
    check_file(custom, 0, 4)

    denied = make_harness(tmp_path / "s")
    denied.add("q", 4, {"hidden_states_path": str(tmp_path / "other.safetensors")})
    denied.step({"q": 4})
    denied.sample("q", 7)
    _, params = denied.finish("q")
    assert params == {"hidden_states_path": str(tmp_path / "s" / "q.safetensors")}
    assert not (tmp_path / "other.safetensors.lock").exists()


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_aborted_request_leaves_nothing(tmp_path: Path, status: RequestStatus) -> None:
    harness = make_harness(tmp_path)
    harness.add("r", 30)
    harness.step({"r": 16})
    assert harness.finish("r", status) == (False, None)
    assert harness.step() == set()
    assert not list(tmp_path.iterdir())


def test_abort_before_the_first_step(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    harness.add("r", 4)
    assert harness.finish("r", RequestStatus.FINISHED_ABORTED) == (False, None)
    assert harness.step() == set()
    assert not list(tmp_path.iterdir())


def test_short_rows_fail_the_request(tmp_path: Path) -> None:
    """Were the engine to finish a request whose rows are not all computed, no file is promised."""
    harness = make_harness(tmp_path)
    request = harness.add("r", 30)
    harness.step({"r": 29})
    assert harness.finish("r") == (False, None)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert request.error is not None and "29 rows" in request.error
    harness.step()
    assert not list(tmp_path.iterdir())


def test_short_blocks_fail_the_request(tmp_path: Path) -> None:
    """Two blocks of three rows cannot hold seven tokens, however many 16 would."""
    harness = make_harness(tmp_path, hs_block_size=3)
    request = harness.add("r", 7)
    harness.step({"r": 7})
    del harness.live["r"].block_ids[-1][2:]
    assert harness.finish("r") == (False, None)
    assert request.error is not None and "6 rows of hidden states for 7 tokens" in request.error


def test_slow_writers_hold_blocks_not_memory(tmp_path: Path) -> None:
    """With writers busy, finished requests wait in the cache; the step never blocks."""
    gate = threading.Event()
    harness = make_harness(tmp_path, num_writer_threads=1)
    saver = harness.worker._saver
    assert saver is not None
    write = saver._write_tensors

    def slow(*args: object) -> None:
        gate.wait(timeout=120)
        write(*args)  # type: ignore[arg-type]

    saver._write_tensors = slow
    names = [f"r{i}" for i in range(5)]
    for name in names:
        harness.add(name, 4)
    harness.step(dict.fromkeys(names, 4))
    for name in names:
        harness.sample(name, 7)
        harness.finish(name)
    sent = harness.step()
    assert len(sent) == 2
    assert harness.step() == set()
    gate.set()
    deadline = time.monotonic() + 60
    while len(sent) < 5:
        assert time.monotonic() < deadline
        sent |= harness.step()
    for i, name in enumerate(names):
        check_file(tmp_path / f"{name}.safetensors", i, 4)


def test_shutdown_stores_what_is_finished(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, num_writer_threads=1)
    names = [f"r{i}" for i in range(8)]
    for name in [*names, "running"]:
        harness.add(name, 4)
    harness.step(dict.fromkeys([*names, "running"], 4))
    for name in names:
        harness.sample(name, 7)
        harness.finish(name)
    harness.step()
    harness.worker.shutdown()
    for i, name in enumerate(names):
        assert torch.equal(
            load_file(tmp_path / f"{name}.safetensors")["hidden_states"], row_values(i, 4)
        )
    data = [f"{name}.safetensors" for name in names]
    assert {p.name for p in tmp_path.iterdir()} == {*data, *(f"{name}.lock" for name in data)}


def test_metadata_survives_pickling(tmp_path: Path) -> None:
    save = module.PendingSave("r", "/x", torch.tensor([1, 2]), [3])
    meta = module.ExampleHiddenStatesConnectorMetadata([save], {"r": "/x"})
    copy = pickle.loads(pickle.dumps(meta))
    assert copy.new_req_filenames == {"r": "/x"}
    assert copy.pending_saves[0].token_ids.tolist() == [1, 2]


def test_store_only_and_layout(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    request = harness.add("r", 40)
    assert harness.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert harness.scheduler.prefer_cross_layer_blocks is False
    cls = module.ExampleHiddenStatesConnector
    assert cls.get_required_kvcache_layout(harness.vllm_config) == "NHD"


def test_needs_extraction() -> None:
    config = extraction_config(None)
    config.kv_transfer_config = transfer_config("ExampleHiddenStatesConnector")
    with pytest.raises(ValueError, match="extract_hidden_states"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize(
    "options",
    [
        {"num_writer_threads": 0},
        {"use_synchronization_lock": "yes"},
        {"shared_storage": "/data"},  # else the files would be in /tmp
    ],
)
def test_bad_settings(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_harness(tmp_path, **options)


def test_group_by_type_and_sole_group() -> None:
    assert find_hidden_states_group(cache_config(16, 3)).index == 1
    plan = ArenaPlan(page_bytes=256, num_pages=4, groups=())
    attention = cache_config(16, None).kv_cache_groups[0].kv_cache_spec
    uniform = UniformTypeKVCacheSpecs(16, {"layers.0.attn": attention, HS_LAYER: hs_spec(16)})
    names = ["layers.0.attn", HS_LAYER]
    both = KVCacheConfig(4, [], [KVCacheGroupSpec(names, uniform)], plan)
    assert find_hidden_states_group(both).layer_name == HS_LAYER
    # The scheduler's view of that group shows its first member's spec only.
    first = KVCacheConfig(4, [], [KVCacheGroupSpec(names, attention)], plan)
    assert find_hidden_states_group(first).index == 0
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["b"], attention)]
    with pytest.raises(ValueError, match="found 0"):
        find_hidden_states_group(KVCacheConfig(4, [], groups, plan))
    twice = [KVCacheGroupSpec([f"cache_only_layers.{i}"], hs_spec(16)) for i in range(2)]
    with pytest.raises(ValueError, match="found 2"):
        find_hidden_states_group(KVCacheConfig(4, [], twice, plan))


def test_cache_of_another_block_size_is_refused(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hs_block_size=3)
    with pytest.raises(ValueError, match="expected \\(num_blocks, 3"):
        harness.worker.register_kv_caches({HS_LAYER: strided_cache(4, 16, COLUMNS, HIDDEN)})


def test_extract_from_kv_cache_reads_strided_blocks() -> None:
    cache = strided_cache(6, 3, COLUMNS, HIDDEN)
    rows = row_values(0, 5)
    slots = torch.tensor([4, 5, 9, 10, 11, 0])
    for slot, row in zip(slots, rows, strict=False):
        cache[slot // 3, slot % 3] = row
    assert torch.equal(module.extract_from_kv_cache(cache, slots, 5), rows)


def test_other_ranks_report_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "stores_hidden_states", lambda: False)
    harness = make_harness(tmp_path)
    harness.add("r", 4)
    harness.step({"r": 4})
    harness.sample("r", 7)
    harness.finish("r")
    assert harness.step() == {"r"}
    assert not list(tmp_path.iterdir())


class WithOwnSettings(
    module.ExampleHiddenStatesConnector, setting_names=("shared_storage_path", "colour")
):
    """Says which settings it knows."""


class WithAnySettings(module.ExampleHiddenStatesConnector):
    """Says nothing, as clients written for other releases."""


def test_settings_of_derived_connectors(tmp_path: Path) -> None:
    def build(cls: type[module.ExampleHiddenStatesConnector], **settings: Any) -> None:
        name = cls.__name__
        transfer = transfer_config(name, shared_storage_path=tmp_path, **settings)
        cls(extraction_config(transfer), KVConnectorRole.SCHEDULER, cache_config())

    build(WithOwnSettings, colour="red")
    build(WithAnySettings, colour="red", shape="round")
    with pytest.raises(ValueError, match=r"shape.*shared_storage_path, colour"):
        build(WithOwnSettings, shape="round")
    with pytest.raises(ValueError, match="colour"):
        build(module.ExampleHiddenStatesConnector, colour="red")


def test_subclass_may_encode_differently(tmp_path: Path) -> None:
    """`_write_tensors(tensors, event, filename, lock_fd)` is where other encodings plug in; it
    closes the descriptor it is given, and the lock still covers the rename."""
    transfer = transfer_config(
        "HalfPrecisionConnector", shared_storage_path=tmp_path, num_writer_threads=1
    )
    transfer.kv_connector_module_path = "tests.distributed.kv_transfer.half_precision_connector"
    harness = Harness(extraction_config(transfer), cache_config())
    path = harness.run_to_end("r", 20)
    data = module.load_hidden_states(path)
    assert data["hidden_states"].dtype == torch.float16
    assert torch.equal(data["hidden_states"], row_values(0, 20).half())
