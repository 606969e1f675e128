# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve a small hybrid checkpoint, chat with it, extract its hidden states.

Starts `vllm serve` with hidden-state extraction on, streams a chat answer, asks for the hidden
states of a prompt, opens the file and compares its rows with transformers'. Everything stops at
the end, also on failure; the exit status says whether all of it worked.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import httpx
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

_ROOT = Path(__file__).resolve().parent.parent
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROMPT = "def read_lines(path):\n    with open(path) as f:\n"


def find_checkpoint() -> Path:
    """The trained demo checkpoint if it is there, else a random tiny one."""
    trained = _ROOT / "examples" / "models" / "tiny-qwen3_5-code"
    if (trained / "model.safetensors").is_file():
        return trained
    sys.path.insert(0, str(_ROOT / "tests"))
    from tiny_models import tiny_model

    return tiny_model("qwen3_5")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def serve_command(model: Path, port: int, layers: list[int], hidden_dir: str) -> list[str]:
    """The command line a drafter trainer would use."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": hidden_dir},
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", "512M"),
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


def start_server(command: list[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """In a session of its own, Ctrl-C reaches only this program."""
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


@contextmanager
def running(command: list[str], base: str, log: Path) -> Iterator[None]:
    """The server, healthy; stopped at the end, whatever happens. A failure comes with its log."""
    # Held back until the server is known, and thus can be stopped; an interrupted bar complains.
    arrived: list[int] = []
    handlers = {n: signal.signal(n, lambda got, _: arrived.append(got)) for n in _INTERRUPTS}
    with log.open("w") as out:
        server = start_server(command, out)
    bar = tqdm(desc="starting the server", bar_format="{desc}: {elapsed}", leave=False)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            interrupt(arrived[0], None)
        started = time.monotonic()
        with bar:
            wait_until_healthy(server, base, bar)
        print(f"server ready after {time.monotonic() - started:.1f} s")
        yield
        if server.poll() is not None:
            raise SystemExit("error: the server died")
    except (Exception, SystemExit) as error:
        raise SystemExit(f"{error}\n\nthe server's log ends:\n{log.read_text()[-4000:]}") from error
    finally:
        try:
            stop(server)
        except KeyboardInterrupt:
            stop(server)
    if server.returncode != 0:
        raise SystemExit(f"error: the server exited with {server.returncode}")
    print("server stopped cleanly")


def wait_until_healthy(server: subprocess.Popen[bytes], base: str, bar: tqdm[NoReturn]) -> None:
    deadline = time.monotonic() + 120
    with httpx.Client(base_url=base, timeout=2) as client:
        while not healthy(client):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("error: the server did not start")
            time.sleep(0.2)
            bar.refresh()


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to what is left."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def stream_chat(base: str) -> None:
    """Print a chat answer as it comes."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Write a Python function clamp. Limit a number."}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    print("\n--- chat, streamed\n")
    pieces = 0
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=120) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"error: chat answered {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(f"error: {chunk['error']}")
                for choice in chunk["choices"]:
                    pieces += 1
                    print(choice["delta"].get("content") or "", end="", flush=True)
    if pieces < 2:
        raise SystemExit("error: the chat answer was empty")
    print()


def extract(base: str, token_ids: list[int]) -> Path:
    """Ask for the hidden states of `token_ids`; returns the file's path."""
    body = {"model": "demo", "prompt": token_ids, "max_tokens": 1, "return_token_ids": True}
    reply = httpx.post(f"{base}/v1/completions", json=body, timeout=120)
    if reply.status_code != 200:
        raise SystemExit(f"error: extraction answered {reply.status_code}: {reply.text}")
    return Path(reply.json()["kv_transfer_params"]["hidden_states_path"])


def wait_for(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors, once its writer has released the lock."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        load_hidden_states,
    )

    tensors = load_hidden_states(path) if Path(f"{path}.lock").exists() else load_file(path)
    return tensors


@torch.inference_mode()
def reference(model: Path, token_ids: list[int], layers: list[int]) -> torch.Tensor:
    """transformers' residual stream `[tokens, layers, hidden]` after that many layers each."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    decoder = network.get_decoder()
    streams: list[torch.Tensor] = []
    for module in [*decoder.layers, decoder.norm]:
        module.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))
    network(torch.tensor([token_ids]))
    return torch.stack([streams[i] for i in layers], dim=1)


def show(tensors: dict[str, torch.Tensor], token_ids: list[int], expected: torch.Tensor) -> None:
    """Print what the file holds and how far it is from the reference; fail if it is wrong."""
    print("\n--- hidden states\n")
    for name, tensor in tensors.items():
        print(f"{name:14} {tuple(tensor.shape)!s:18} {tensor.dtype}")
    got = tensors["hidden_states"].float()
    if tensors["token_ids"].tolist() != token_ids or got.shape != expected.shape:
        raise SystemExit("error: the file does not hold the prompt's rows")
    error = ((got - expected).norm() / expected.norm()).item()
    print(f"relative difference from transformers: {error:.1e}")
    if not error < 1e-4:
        raise SystemExit("error: the rows differ from transformers' by more than 1e-4")


def interrupt(signal_number: int, _: object) -> None:
    """Leave, once: whatever comes after the first signal must not disturb stopping the server."""
    for number in _INTERRUPTS:
        # Not SIG_IGN: Python complains about a signal that is already on its way to a handler.
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt(signal_number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the demo's)")
    model = parser.parse_args().model or find_checkpoint()
    if not (model / "config.json").is_file():
        parser.error(f"--model {model}: no checkpoint is there")
    count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    layers = sorted({min(2, count), count // 2, count})
    token_ids = AutoTokenizer.from_pretrained(model)(_PROMPT).input_ids
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="vllm-demo-") as scratch:
        command = serve_command(model, port, layers, scratch)
        print(f"model {model}\n$ {shlex.join(command)}")
        with running(command, base, Path(scratch) / "server.log"):
            stream_chat(base)
            tensors = wait_for(extract(base, token_ids))
            print("\ncomputing the same with transformers", flush=True)
            expected = reference(model, token_ids, layers)
            show(tensors, token_ids, expected)
    print("\nall of it worked")


if __name__ == "__main__":
    # Its reference implementations are what the comparison wants; no need to warn about them.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for number in _INTERRUPTS:
        signal.signal(number, interrupt)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
