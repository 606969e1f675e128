# SPDX-License-Identifier: Apache-2.0
"""`make demo` says whether it worked, and leaves no server behind."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from example_process import TRAINED, assert_gone, children, run, start, wait_for

from tests.forked_python import CapturedPython

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_works_and_is_tidy() -> None:
    demo = run("demo")
    assert demo.returncode == 0, demo.stderr
    assert "tiny-qwen3_5-code" in demo.stdout
    found = re.search(r"relative difference from transformers: (\S+)", demo.stdout)
    assert found and float(found[1]) < 1e-4
    assert demo.stdout.endswith("server stopped cleanly\n\nall of it worked\n")
    # Only the start-up clock, which is drawn over itself and wiped at the end.
    shown = {line.strip() for line in demo.stderr.splitlines()}
    assert all(re.fullmatch(r"(starting the server: \d+:\d+)?", line) for line in shown), shown


def server_of(demo: CapturedPython) -> bool:
    return any("serve" in child.cmdline() for child in children(demo))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(number: signal.Signals) -> None:
    demo = start("demo")
    wait_for(lambda: server_of(demo), demo)
    server = children(demo)
    demo.send_signal(number)
    # A second one, while the first is being obeyed, must not leave the server alone either.
    demo.send_signal(number)
    out, err = demo.communicate(timeout=240)
    assert demo.returncode == 1
    assert "all of it worked" not in out
    assert err.rstrip().endswith("interrupted") and "Traceback" not in err
    assert_gone(server)


def test_server_that_does_not_start(tmp_path: Path) -> None:
    model = Path(shutil.copytree(TRAINED, tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"broken")
    demo = run("demo", "--model", str(model))
    assert demo.returncode == 1
    assert "error: the server did not start" in demo.stderr
    assert "the server's log ends:" in demo.stderr
    assert "demo.py" not in demo.stderr, "a traceback of the demo itself explains nothing"
