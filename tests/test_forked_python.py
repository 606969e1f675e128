# SPDX-License-Identifier: Apache-2.0
"""One process to fork from, for all test processes of a run, as long as there are any."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from tests import forked_python
from tests.forked_python import _address, _await_request, _Origin, run_python

INTERPRETS = "TRITON_INTERPRET" in os.environ
RAN = "from pathlib import Path; Path('ran').touch()"


def test_a_second_one_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another test process of the run finds it."""
    (tmp_path / "script.py").write_text(RAN)
    monkeypatch.chdir(tmp_path)
    first = forked_python._origin(INTERPRETS)
    second = _Origin(INTERPRETS)
    assert second._process is None and second._name == first._name
    second.check(os.environ)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS: needs a fresh interpreter"):
        second.check({**os.environ, "OMP_NUM_THREADS": "77"})
    second.end()
    assert run_python("script.py").returncode == 0 and (tmp_path / "ran").exists()


def test_it_ends_with_the_last_test_process() -> None:
    name = f"vllm-tests-of-the-end-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(name))
        listener.listen()
        process = multiprocessing.get_context("fork").Process(
            target=_await_request, args=(listener, b"{}")
        )
        process.start()
    one, other = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with one, other:
        for client in (one, other):
            client.connect(_address(name))
            assert client.recv(10) == b"{}"
        one.close()
        process.join(0.2)
        assert process.is_alive()
        other.close()
        process.join(60)
    assert process.exitcode == 0
