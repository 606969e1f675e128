# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot be served: offline an error, `vllm serve` one clear last line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.remote_server import MAIN
from tests.forked_python import run_python
from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.e2e

WEIGHTS = "model.safetensors"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"

Damage = Callable[[Path], None]


def edit_config(**changes: Any) -> Damage:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def edit_weights(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return damage


def cut_weights(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def lose_a_shard(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    first = "model-00001-of-00002.safetensors"
    save_file(tensors, path / first)
    weight_map = dict.fromkeys(tensors, first) | {UP_PROJ: "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def replace(name: str, content: bytes) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(content)

    return damage


def remove(*names: str) -> Damage:
    def damage(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return damage


#: name -> (damage, words of the message)
CASES: dict[str, tuple[Damage, str]] = {
    "truncated weights": (cut_weights, f"{WEIGHTS} is truncated or corrupt"),
    "random weights": (replace(WEIGHTS, b"\xff" * 4096), f"{WEIGHTS} is truncated or corrupt"),
    "empty weights": (replace(WEIGHTS, b""), f"{WEIGHTS} is truncated or corrupt"),
    "absurd header": (replace(WEIGHTS, b"\0" * 5 + b"\x01\0\0{}"), "is truncated or corrupt"),
    "no weights": (remove(WEIGHTS), "no *.safetensors file"),
    "lost shard": (lose_a_shard, "absent files: model-00002-of-00002.safetensors"),
    "missing tensor": (edit_weights(lambda t: t.pop(UP_PROJ)), f"missing: {UP_PROJ}"),
    "surplus tensor": (
        edit_weights(lambda t: t.update(extra=torch.zeros(2))),
        "surplus: extra [2]",
    ),
    "mis-shaped tensor": (
        edit_weights(lambda t: t.update({UP_PROJ: torch.zeros(3, 5)})),
        f"mis-shaped: {UP_PROJ}: expected shape [96, 64], found [3, 5]",
    ),
    "mis-shaped recurrence": (
        edit_weights(lambda t: t.update({"model.layers.0.linear_attn.A_log": torch.zeros(3)})),
        "mis-shaped: model.layers.0.linear_attn.A_log: expected shape [4], found [3]",
    ),
    "other sizes": (edit_config(num_attention_heads=8), "mis-shaped: model.layers.3.self_attn."),
    "heads that do not divide": (
        edit_config(num_attention_heads=3),
        "3 query heads for 2 key/value heads are not supported",
    ),
    "no config": (remove("config.json"), "holds no config.json"),
    "broken config": (replace("config.json", b'{"model_type": '), "config.json is not valid JSON"),
    "config list": (replace("config.json", b"[]"), "config.json must hold a JSON object"),
    "unknown architecture": (
        edit_config(architectures=["NoSuchForCausalLM"]),
        "architecture NoSuchForCausalLM",
    ),
    "unknown model type": (
        edit_config(architectures=["NoSuchForCausalLM"], model_type="nosuch"),
        "model_type 'nosuch'",
    ),
    "broken tokenizer": (replace("tokenizer.json", b"{"), "no tokenizer can be loaded"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
}
#: cases found at different moments: reading the config; in the engine's process, opening the
#: weights and comparing them with the model (a message of many lines)
SERVED = ("unknown architecture", "truncated weights", "mis-shaped tensor")


def damaged(name: str, path: Path) -> str:
    checkpoint = path / "checkpoint"
    shutil.copytree(tiny_model("qwen3_5"), checkpoint)
    CASES[name][0](checkpoint)
    return str(checkpoint)


@pytest.mark.parametrize("name", CASES)
def test_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(VLLMValidationError) as caught:
        LLM(damaged(name, tmp_path), dtype="float32", kv_cache_memory_bytes=32 << 20)
    assert CASES[name][1] in str(caught.value)


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, tmp_path: Path) -> None:
    flags = ["--dtype", "float32", "--port", "0", "--kv-cache-memory-bytes", "32M"]
    done = run_python(MAIN, "serve", damaged(name, tmp_path), *flags)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("vllm serve: error: ") and CASES[name][1] in last
    assert "Traceback" not in done.stderr
