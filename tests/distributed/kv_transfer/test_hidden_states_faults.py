# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, directories that cannot be written: one request fails, the rest go on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import Harness, make_harness, row_values
from tests.forked_python import run_python
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import CompletedCopy
from vllm.v1.engine import RequestConflict
from vllm.v1.request import RequestStatus


def fail_first_step(harness: Harness, name: str, kv_params: dict[str, Any] | None = None) -> str:
    """Run a request's first step, end it as the engine does with a failed one; the reason."""
    harness.add(name, 4, kv_params)
    harness.step({name: 4})
    reason = harness.failed.pop(name)
    assert harness.finish(name, RequestStatus.FINISHED_ERROR) == (False, None)
    assert harness.step() == set()
    return reason.message if isinstance(reason, RequestConflict) else reason


def test_storage_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("")
    harness = make_harness(tmp_path / "storage")
    reason = fail_first_step(harness, "r")
    assert "cannot be stored" in reason and str(tmp_path / "storage") in reason
    (tmp_path / "storage").unlink()
    path = harness.run_to_end("later", 4)
    assert torch.equal(load_hidden_states(path)["hidden_states"], row_values(1, 4))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any directory")
def test_unwritable_directory(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in fail_first_step(harness, "r")
    finally:
        tmp_path.chmod(0o700)
    harness.run_to_end("later", 4)


def test_directory_removed_while_running(tmp_path: Path) -> None:
    """A client may clean the whole directory between two requests."""
    storage = tmp_path / "storage"
    harness = make_harness(storage)
    storage.rmdir()
    for index, name in enumerate("ab"):
        path = harness.run_to_end(name, 4)
        assert torch.equal(load_hidden_states(path)["hidden_states"], row_values(index, 4))
        shutil.rmtree(storage)


def test_one_path_for_two_requests(tmp_path: Path) -> None:
    """Waiting for the other's lock would stop the engine, so the second request fails."""
    harness = make_harness(tmp_path, allow_custom_save_path=True)
    params = {"hidden_states_path": str(tmp_path / "same.safetensors")}
    harness.add("first", 4, params)
    harness.step({"first": 4})
    assert "in use" in fail_first_step(harness, "second", params)
    harness.sample("first", 7)
    harness.finish("first")
    assert harness.step() == {"first"}
    data = load_hidden_states(tmp_path / "same.safetensors")
    assert torch.equal(data["hidden_states"], row_values(0, 4))


@pytest.mark.parametrize("req_id", ["a/b", "../up", "..", "x" * 300])
def test_request_ids_that_are_no_file_names(tmp_path: Path, req_id: str) -> None:
    storage = tmp_path / "storage"
    harness = make_harness(storage)
    fail_first_step(harness, req_id)
    assert [p.name for p in tmp_path.iterdir()] == ["storage"]
    assert not list(storage.iterdir())


def test_lost_rows_while_writing(tmp_path: Path) -> None:
    """An error on the writer thread: no data under the name, no partial file, a free lock."""
    harness = make_harness(tmp_path)
    saver = harness.worker._saver
    assert saver is not None

    def full_disk(tensors: object, event: object, filename: str, lock_fd: int | None) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device", filename)

    saver._write_tensors, write = full_disk, saver._write_tensors
    path = harness.run_to_end("r", 4)
    with pytest.raises(FileNotFoundError, match="has not written"):
        load_hidden_states(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors.lock"]
    saver._write_tensors = write
    harness.run_to_end("later", 4)


def test_rows_and_tokens_must_agree(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    path = tmp_path / "x"
    tensors = {"hidden_states": torch.zeros(3, 2, 4), "token_ids": torch.arange(4)}
    with pytest.raises(ValueError, match="3 rows for 4 tokens"):
        type(harness.worker)._write_tensors(tensors, CompletedCopy(), str(path), None)
    assert not path.exists()


def test_no_descriptors_leak(tmp_path: Path) -> None:
    harness = make_harness(tmp_path)
    load_hidden_states(harness.run_to_end("warm", 4))
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        load_hidden_states(harness.run_to_end(f"done{i}", 4))  # a writer has room again
        harness.add(f"aborted{i}", 4)
        harness.step({f"aborted{i}": 4})
        harness.finish(f"aborted{i}", RequestStatus.FINISHED_ABORTED)
        harness.step()
    harness.worker.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before


_LIMITED = """
import resource, sys
from pathlib import Path
from tests.distributed.kv_transfer.extraction_harness import make_harness
from tests.distributed.kv_transfer.test_hidden_states_faults import (
    fail_first_step,
    load_hidden_states,
)

path = Path(sys.argv[1])
harness = make_harness(path)
load_hidden_states(harness.run_to_end("before", 40))
{setup}
reason = fail_first_step(harness, "r")
assert "{expected}" in reason, reason
{undo}
assert not list(path.glob(".*")), list(path.iterdir())
assert not (path / "r.safetensors").exists()
harness.run_to_end("after", 40)
harness.worker.shutdown()
assert (path / "after.safetensors").exists()
print("survived")
"""


def run_limited(tmp_path: Path, setup: str, undo: str, expected: str) -> None:
    """In a process of its own, since limits count for the whole process."""
    script = tmp_path.with_suffix(".py")
    script.write_text(_LIMITED.format(setup=setup, undo=undo, expected=expected))
    result = run_python(str(script), str(tmp_path))
    assert result.returncode == 0 and "survived" in result.stdout, result.stderr


def test_no_room_for_the_rows_is_found_before_the_reply(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: space is asked for in the first step."""
    run_limited(
        tmp_path,
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)",
        "File too large",
    )


def test_out_of_descriptors(tmp_path: Path) -> None:
    run_limited(
        tmp_path,
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
        "Too many open files",
    )


def test_full_tmpfs(tmp_path: Path) -> None:
    """A real full file system, where the test may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        harness = make_harness(mount)
        (mount / "filler").write_bytes(bytes(60 * 1024))
        assert "No space left" in fail_first_step(harness, "r")
        assert [p.name for p in mount.iterdir()] == ["filler"]
        (mount / "filler").unlink()
        harness.run_to_end("later", 4)
        harness.worker.shutdown()
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_reserved_space_is_written_in_place(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    tensor_file.create(path, 1 << 16)
    before = os.stat(path)
    assert before.st_blocks * 512 >= 1 << 16
    tensor_file.write(path, {"a": torch.zeros(10)})
    after = os.stat(path)
    assert after.st_ino == before.st_ino and after.st_size < 4096
