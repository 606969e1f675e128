# SPDX-License-Identifier: Apache-2.0
"""An installed package's entry point reaches every process and serves a model of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import run_python
from tests.nightly import nightly
from tests.tiny_models import hf_reference_generate, tiny_model

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5]
PLUGIN = """
import os
from pathlib import Path

from vllm import ModelRegistry


def register():
    with Path(os.environ["PLUGIN_LOG"]).open("a") as log:
        log.write(f"{os.getpid()}\\n")
    ModelRegistry.register_model("GuestForCausalLM", "guest_plugin.model:GuestForCausalLM")
"""
MODEL = '''
from vllm.model_executor.models.llama import LlamaForCausalLM


class GuestForCausalLM(LlamaForCausalLM):
    """Somebody else's model."""
'''
MAIN = """
import json
import sys

if len(sys.argv) > 3:
    sys.path.insert(0, sys.argv[3])

from vllm import LLM, ModelRegistry, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 22)
    assert "GuestForCausalLM" in ModelRegistry.get_supported_archs()
    assert "guest_plugin.model" in sys.modules, "the front end reads the class's capabilities"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([json.loads(sys.argv[2])], params, use_tqdm=False)
    print("TOKENS", list(output.outputs[0].token_ids), llm.llm_engine.engine_core.process_id)
    llm.shutdown()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory like site-packages with one package that has an entry point."""
    site = tmp_path / "site"
    package, info = site / "guest_plugin", site / "guest_plugin-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "model.py").write_text(MODEL)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nguest = guest_plugin:register\n"
    )
    return site


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["GuestForCausalLM"]}))
    return path


def run(site: Path, checkpoint: Path, method: str) -> subprocess.CompletedProcess[str]:
    """With "spawn" a fresh interpreter and its core's, which have the package on their paths from
    the beginning."""
    script = site.parent / "main.py"
    script.write_text(MAIN)
    arguments = [str(checkpoint), json.dumps(PROMPT)]
    environment = {
        **os.environ,
        "PLUGIN_LOG": str(site.parent / "pids"),
        "VLLM_WORKER_MULTIPROC_METHOD": method,
    }
    if method == "fork":
        return run_python(str(script), *arguments, str(site), env=environment)
    environment["PYTHONPATH"] = os.pathsep.join([str(site), *(p for p in sys.path if p)])
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("method", ["fork", *nightly("spawn")])
def test_it_serves_its_model_in_every_process(
    installed: Path, checkpoint: Path, method: str
) -> None:
    done = run(installed, checkpoint, method)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS"))
    tokens = json.loads(line[line.index("[") : line.index("]") + 1])
    assert tokens == hf_reference_generate(tiny_model("llama"), PROMPT, 6)
    pids = (installed.parent / "pids").read_text().split()
    core = line.split()[-1]
    # Forked or not, the core's process starts before its parent has run a plugin.
    assert len(pids) == 2 and core in pids, "a plugin runs once per process"
    assert len(set(pids)) == 2


def test_without_it_the_model_is_unknown(installed: Path, checkpoint: Path) -> None:
    script = installed.parent / "main.py"
    script.write_text(MAIN)
    env = {**os.environ, "PLUGIN_LOG": str(installed.parent / "pids"), "VLLM_PLUGINS": "another"}
    done = run_python(str(script), str(checkpoint), json.dumps(PROMPT), str(installed), env=env)
    assert done.returncode != 0
    assert "GuestForCausalLM" in done.stderr.splitlines()[-1]
    assert not (installed.parent / "pids").exists()
