# SPDX-License-Identifier: Apache-2.0
"""Where hidden states may be stored, whose rows a path holds, and what is left of the rest."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.kv_transfer.extraction_harness import (
    Harness,
    make_harness,
    row_values,
    transfer_config,
)
from tests.forked_python import ForkedPython
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import file_lock, spool
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import (
    PathRefused,
    custom_path,
)
from vllm.v1.engine import RequestConflict
from vllm.v1.request import RequestStatus


def allowing(path: Path, **options: object) -> Harness:
    return make_harness(path, allow_custom_save_path=True, **options)


def run(harness: Harness, name: str, custom: object, num_tokens: int = 4) -> Path:
    """A request with its own path, until its rows are written."""
    harness.add(name, num_tokens, {"hidden_states_path": custom})
    harness.step({name: num_tokens})
    assert name not in harness.failed, harness.failed
    harness.sample(name, 7)
    _, params = harness.finish(name)
    assert params is not None and harness.step() == {name}
    drain(harness)
    return Path(params["hidden_states_path"])


def drain(harness: Harness) -> None:
    while harness.worker._saver._in_flight:
        pass


def refused(harness: Harness, name: str, custom: object) -> str:
    """A request that ends in its first step through a fault of its client; returns the message."""
    harness.add(name, 4, {"hidden_states_path": custom})
    harness.step({name: 4})
    reason = harness.failed.pop(name)
    assert isinstance(reason, RequestConflict), reason
    harness.finish(name, RequestStatus.FINISHED_ERROR)
    harness.step()
    return reason.message


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("x.safetensors", "/data/hs/x.safetensors"),
        ("a/b//./x", "/data/hs/a/b/x"),
        ("/data/hs/a b/x.safetensors", "/data/hs/a b/x.safetensors"),
        (Path("/data/hs/ü"), "/data/hs/ü"),
        ("...", "/data/hs/..."),
    ],
)
def test_paths_below_the_storage_directory(asked: object, expected: str) -> None:
    assert custom_path("/data/hs", asked) == expected


@pytest.mark.parametrize(
    "asked",
    [
        "/etc/passwd", "/data/hs", "/data/hs/", ".", "..", "../x", "a/../x", "/data/hs/../hs/x",
        "/data/hsx/y", "x/", "", 7, ["x"], {"a": 1}, True, "a\0b", "a\nb", "a\x1b[31m", "a\u2028b",
        "\ud800", "x.lock", "a/.incomplete-0/b", "x" * 251, "d" * 256 + "/x", "d/" * 2000 + "x",
    ],
)  # fmt: skip
def test_other_paths_are_refused_before_the_engine_sees_them(asked: object) -> None:
    with pytest.raises(PathRefused) as error:
        custom_path("/data/hs", asked)
    assert str(error.value).isprintable()


def test_a_request_is_checked_by_the_connectors_class() -> None:
    extra = {"shared_storage_path": "/data/hs", "allow_custom_save_path": True}
    own = transfer_config("ExampleHiddenStatesConnector", **extra)
    multi = transfer_config("MultiConnector", connectors=[own])
    for config in (own, multi):
        check = KVConnectorFactory.get_connector_class(config).check_request
        check(config, {"hidden_states_path": "x", "include_output_tokens": True, "other": 1}, 1)
        check(config, {"include_output_tokens": True}, 3)
        for params in ({"hidden_states_path": "../x"}, {"include_output_tokens": "yes"}):
            with pytest.raises(ValueError):
                check(config, params, 1)
        with pytest.raises(ValueError, match="one file for 3 completions"):
            check(config, {"hidden_states_path": "x"}, 3)
    ignoring = transfer_config("ExampleHiddenStatesConnector")
    check_ignored = KVConnectorFactory.get_connector_class(ignoring).check_request
    check_ignored(ignoring, {"hidden_states_path": "/etc/passwd"}, 3)


@pytest.mark.parametrize("asked", ["/outside/x", "../x", 7, "a\nb"])
def test_the_engine_refuses_them_too(tmp_path: Path, asked: object) -> None:
    assert "hidden_states_path" in refused(allowing(tmp_path / "s"), "r", asked)
    assert not list(tmp_path.rglob("*x*"))


# ---- links and other things that are no regular files ------------------------------------------


def link_directory(storage: Path, outside: Path) -> str:
    (storage / "d").symlink_to(outside)
    return "d/x"


def link_deep_directory(storage: Path, outside: Path) -> str:
    (storage / "a").mkdir()
    (storage / "a" / "d").symlink_to(outside)
    return "a/d/e/x"


def link_file(storage: Path, outside: Path) -> str:
    (outside / "target").write_text("mine")
    (storage / "x").symlink_to(outside / "target")
    return "x"


def link_dangling(storage: Path, outside: Path) -> str:
    (storage / "x").symlink_to(outside / "new")
    return "x"


def link_lock(storage: Path, outside: Path) -> str:
    (storage / "x.lock").symlink_to(outside / "new")
    return "x"


def lock_is_directory(storage: Path, outside: Path) -> str:
    (storage / "x.lock").mkdir()
    return "x"


def directory(storage: Path, outside: Path) -> str:
    (storage / "x").mkdir()
    return "x"


def fifo(storage: Path, outside: Path) -> str:
    os.mkfifo(storage / "x")
    return "x"


def fifo_lock(storage: Path, outside: Path) -> str:
    os.mkfifo(storage / "x.lock")
    return "x"


def file_as_directory(storage: Path, outside: Path) -> str:
    (storage / "f").write_text("")
    return "f/x"


def device(storage: Path, outside: Path) -> str:
    try:
        os.mknod(storage / "x", 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device node needs privileges")
    return "x"


@pytest.mark.parametrize(
    "prepare",
    [
        link_directory, link_deep_directory, link_file, link_dangling, link_lock, lock_is_directory,
        directory, fifo, fifo_lock, file_as_directory, device,
    ],
)  # fmt: skip
def test_only_regular_files_and_real_directories(
    tmp_path: Path, prepare: Callable[[Path, Path], str]
) -> None:
    storage, outside = tmp_path / "s", tmp_path / "outside"
    storage.mkdir()
    outside.mkdir()
    asked = prepare(storage, outside)
    before = sorted((str(p), p.lstat().st_mode) for p in tmp_path.rglob("*"))
    harness = allowing(storage)
    message = refused(harness, "r", asked)
    assert "regular file" in message or "link or no directory" in message
    assert sorted((str(p), p.lstat().st_mode) for p in tmp_path.rglob("*")) == before
    assert not (outside / "target").exists() or (outside / "target").read_text() == "mine"
    assert torch.equal(rows_of(run(harness, "later", "y")), row_values(1, 4))


def rows_of(path: Path) -> Tensor:
    return load_hidden_states(path)["hidden_states"]


def test_a_directory_that_becomes_a_link(tmp_path: Path) -> None:
    """Between the request's start and its end; the reply has promised a file by then."""
    storage, outside = tmp_path / "s", tmp_path / "outside"
    outside.mkdir()
    harness = allowing(storage)
    harness.add("r", 4, {"hidden_states_path": "d/x"})
    harness.step({"r": 4})
    (storage / "d").rename(storage / "old")
    (storage / "d").symlink_to(outside)
    harness.sample("r", 7)
    harness.finish("r")
    harness.step()
    drain(harness)
    assert not list(outside.iterdir())
    assert not list(storage.glob(".incomplete-*"))


# ---- a path used twice -------------------------------------------------------------------------


@pytest.mark.parametrize("use_synchronization_lock", [True, False])
def test_the_second_request_replaces_the_first(
    tmp_path: Path, use_synchronization_lock: bool
) -> None:
    harness = allowing(tmp_path, use_synchronization_lock=use_synchronization_lock)
    for index in range(2):
        path = run(harness, f"r{index}", "x", num_tokens=5 - index)
        (tmp_path / "x.lock").touch()
        assert torch.equal(rows_of(path), row_values(index, 5 - index))


def fail_write(harness: Harness) -> None:
    def full_disk(tensors: object, event: object, filename: str, lock_fd: int | None) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device", filename)

    harness.worker._saver._write_tensors = full_disk


def test_after_a_failed_write_the_path_holds_nothing(tmp_path: Path) -> None:
    harness = allowing(tmp_path)
    run(harness, "first", "x")
    fail_write(harness)
    path = run(harness, "second", "x")
    with pytest.raises(FileNotFoundError, match="has not written"):
        load_hidden_states(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.lock"]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_after_an_abort_the_path_holds_nothing(tmp_path: Path, status: RequestStatus) -> None:
    harness = allowing(tmp_path)
    run(harness, "first", "x")
    harness.add("second", 4, {"hidden_states_path": "x"})
    harness.step({"second": 4})
    assert [p.name for p in tmp_path.glob("[!.]*")] == ["x.lock"]
    harness.finish("second", status)
    harness.step()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("use_synchronization_lock", [True, False])
def test_two_requests_at_a_time(tmp_path: Path, use_synchronization_lock: bool) -> None:
    """Without locks, too, the second one may not write into the first one's file."""
    harness = allowing(tmp_path, use_synchronization_lock=use_synchronization_lock)
    harness.add("first", 4, {"hidden_states_path": "x"})
    harness.step({"first": 4})
    assert "in use" in refused(harness, "second", "x")
    harness.sample("first", 7)
    harness.finish("first")
    harness.step()
    drain(harness)
    (tmp_path / "x.lock").touch()
    assert torch.equal(rows_of(tmp_path / "x"), row_values(0, 4))


def test_a_reader_keeps_the_next_request_away(tmp_path: Path) -> None:
    harness = allowing(tmp_path)
    path = run(harness, "first", "x")
    with file_lock.reading(str(path)):
        assert "in use" in refused(harness, "second", "x")
        assert path.exists()
    assert torch.equal(rows_of(path), row_values(0, 4))


def test_a_lock_file_that_a_reader_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before the reader unlinked it, locked after: nobody else could see such a lock."""
    real_flock, removed = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.append((tmp_path / "x.lock").unlink())
        real_flock(fd, operation)

    dir_fd = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(fcntl, "flock", flock)
    fd = file_lock.acquire("x.lock", dir_fd)
    assert removed and os.path.samestat(os.fstat(fd), (tmp_path / "x.lock").stat())
    os.close(fd)
    os.close(dir_fd)


# ---- what a killed server leaves ---------------------------------------------------------------

_KILLED = """
import os, signal, sys, threading
from pathlib import Path
from tests.distributed.kv_transfer.test_hidden_states_paths import allowing, run

harness = allowing(Path(sys.argv[1]))
run(harness, "done", "deep/done")
for name in ("running", "deep/custom"):
    harness.add(name.replace("/", "-"), 4, {"hidden_states_path": name} if "/" in name else None)
harness.step({"running": 4, "deep-custom": 4})
gate = threading.Event()
harness.worker._saver._write_tensors = lambda *_: gate.wait()
harness.sample("running", 7)
harness.finish("running")
harness.step()
print("ready", flush=True)
signal.pause()
"""


def test_the_next_server_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    script = tmp_path.with_suffix(".py")
    script.write_text(_KILLED)
    output, end = os.pipe()
    with os.fdopen(output) as said:
        with os.fdopen(end, "w") as log:
            server = ForkedPython(str(script), [str(tmp_path)], log)
        assert any("ready" in line for line in said)
        alive = make_harness(tmp_path)  # leaves a living server's files alone
        assert (tmp_path / "running.safetensors.lock").exists()
        assert len([p for p in tmp_path.glob(".incomplete-*/*/**/*") if p.is_file()]) == 2
        server.kill()
        server.wait()
    alive.run_to_end("other", 4)
    drain(alive)
    alive.add("open", 4)
    alive.step({"open": 4})
    mine = tmp_path / "unrelated.safetensors.lock"
    mine.touch()
    harness = make_harness(tmp_path)
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("[!.]*") if p.is_file()}
    incomplete = {name for name in found if name.startswith(".")}
    assert found - incomplete == {
        "deep/done", "deep/done.lock", "unrelated.safetensors.lock", "open.safetensors.lock",
        "other.safetensors", "other.safetensors.lock",
    }  # fmt: skip
    assert len(incomplete) == 2  # of the one that lives: its lock, and the open request's file
    alive.worker.shutdown()
    harness.worker.shutdown()
    assert not list(tmp_path.glob(".incomplete-*"))


def test_a_path_that_a_living_server_completes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead one left it incomplete; its file comes between the look at it and at its lock."""
    harness = allowing(tmp_path)
    harness.add("r", 4, {"hidden_states_path": "x"})
    harness.step({"r": 4})
    base = tmp_path / f".incomplete-{os.geteuid()}"
    (base / "dead").mkdir()
    (base / "dead" / "x").touch()
    (base / "dead.lock").touch()
    lock_if_free, looked_at = spool._lock_if_free, []

    def complete_first(path: str) -> int | None:
        looked_at.append(os.path.relpath(path, tmp_path))
        if looked_at[-1] == "x.lock":
            harness.sample("r", 7)
            harness.finish("r")
            harness.step()
            drain(harness)
        return lock_if_free(path)

    monkeypatch.setattr(spool, "_lock_if_free", complete_first)
    spool.remove_leftovers(str(tmp_path))
    assert "x.lock" in looked_at and not (base / "dead").exists()
    assert torch.equal(rows_of(tmp_path / "x"), row_values(0, 4))


def test_incomplete_files_of_another_user_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that all may write to, someone may make ours first."""
    if os.geteuid() != 0:
        pytest.skip("giving a directory away needs privileges")
    base = tmp_path / f".incomplete-{os.geteuid()}"
    base.mkdir()
    (base / "theirs").touch()
    os.chown(base, 12345, 12345)
    harness = make_harness(tmp_path)
    harness.add("r", 4)
    harness.step({"r": 4})
    assert "another user" in str(harness.failed["r"])
    assert [p.name for p in base.iterdir()] == ["theirs"]
