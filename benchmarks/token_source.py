# SPDX-License-Identifier: Apache-2.0
"""A server whose model costs nothing: what is left is the cost of everything around it.

Scheduler, state memory, sockets, detokenisation and HTTP are the real ones; only the executor is
replaced by one that returns arbitrary tokens, at most one step every `step_s` seconds.

    python -m benchmarks.token_source --port 8000 --step-ms 20
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.placements import Placement
from vllm.v1.core.placed_arena import BesideArena, PlacementSpecs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks

_BLOCK_SIZE = 16
_NUM_BLOCKS = 40_000
_MAX_MODEL_LEN = 4096
_VOCAB_SIZE = 4096
#: ends the reasoning of a reply, where replies reason
_END_OF_REASONING = "</think>"
_CONVERSATION = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
_DOCS = Path(__file__).resolve().parent.parent / "docs"


def train_tokenizer(directory: Path, reasons: bool = False) -> int:
    """A byte-level BPE over this project's docs, saved to `directory`; returns its size.

    `reasons`: its chat template opens the reasoning of the reply, and its last token closes it.
    """
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train([str(page) for page in sorted(_DOCS.glob("*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = _CONVERSATION
    if reasons:
        tokenizer.add_tokens([_END_OF_REASONING])
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def servable(model: Path, directory: Path) -> Path:
    """`model`, or a copy of its configuration in `directory` with a tokenizer if it has none."""
    if (model / "tokenizer.json").exists():
        return model
    shutil.copy(model / "config.json", directory)
    config = json.loads((model / "config.json").read_text())
    train_tokenizer(directory)
    pad_vocabulary(directory / "tokenizer.json", config.get("text_config", config)["vocab_size"])
    return directory


def pad_vocabulary(path: Path, size: int) -> None:
    """Give every id below `size` a text, so that whatever a model generates can be shown."""
    content = json.loads(path.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # A special token keeps its id only if the vocabulary has it too.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    taken = set(vocabulary.values())
    vocabulary |= {f"w{i}": i for i in range(size) if i not in taken}
    path.write_text(json.dumps(content))


def make_config(
    directory: Path,
    max_num_seqs: int,
    step_s: float,
    num_blocks: int = _NUM_BLOCKS,
    max_model_len: int = _MAX_MODEL_LEN,
    reasoning_tokens: int = 0,
) -> VllmConfig:
    """A configuration without weights; the tokenizer is written to `directory`."""
    vocab_size = train_tokenizer(directory, reasons=reasoning_tokens > 0)
    hf_config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=max_model_len,
        architectures=["LlamaForCausalLM"],
        eos_token_id=None,  # the tokenizer's alone; Llama's default is some word
    )
    return VllmConfig(
        model_config=ModelConfig(
            model=str(directory),
            tokenizer=str(directory),
            hf_config=hf_config,
            dtype="float32",
            max_model_len=max_model_len,
            served_model_name="tokens",
            generation_config="vllm",
        ),
        cache_config=CacheConfig(block_size=_BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
            async_scheduling=True,
        ),
        device_config=DeviceConfig(device="cpu"),
        additional_config={
            "step_s": step_s,
            "vocab_size": vocab_size,
            "reasoning_tokens": reasoning_tokens,
        },
    )


class TokenExecutor(Executor):
    """Returns a token per request and step, paced by one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._step_s: float = vllm_config.additional_config["step_s"]
        #: the tokens of every reply before the one that ends its reasoning
        self._reasoning_tokens: int = vllm_config.additional_config["reasoning_tokens"]
        #: tokens so far, by request, of replies that reason
        self._num_made: Counter[str] = Counter()
        self._end_of_reasoning: int = vllm_config.additional_config["vocab_size"] - 1
        self._vocab_size = self._end_of_reasoning + (not self._reasoning_tokens)
        self._num_steps = 0
        self._next_start = 0.0
        self._pool = ThreadPoolExecutor(1)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        spec = FullAttentionSpec(
            block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        return [{"layers.0": spec}]

    def get_placed_specs(self, placement: Placement | None = None) -> list[list[PlacementSpecs]]:
        return [[]]

    def get_bytes_beside(self, placement: Placement | None = None) -> list[BesideArena]:
        return [BesideArena()]

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Nothing is kept."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._pool.submit(self._execute, scheduler_output)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._next_start - time.monotonic()))
        self._next_start = time.monotonic() + self._step_s
        self._num_steps += 1
        req_ids = list(output.num_scheduled_tokens)
        if self._reasoning_tokens:
            self._num_made.update(output.sampling_req_ids)
            for req_id in output.finished_req_ids:
                self._num_made.pop(req_id, None)
        tokens = [
            [self._token(i, req_id)] if req_id in output.sampling_req_ids else []
            for i, req_id in enumerate(req_ids)
        ]
        return ModelRunnerOutput(req_ids=req_ids, sampled_token_ids=tokens)

    def _token(self, row: int, req_id: str) -> int:
        if self._reasoning_tokens and self._num_made[req_id] == self._reasoning_tokens + 1:
            return self._end_of_reasoning
        return (self._num_steps * 17 + row * 31) % self._vocab_size

    def send_token_masks(self, masks: FilledMasks) -> None:
        """Tokens are arbitrary: a constrained request ends with an error."""

    def init_kv_output_aggregator(self, connector: object) -> None:
        """There are no transfers."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        raise NotImplementedError("there is no worker")

    def check_health(self) -> None:
        """Always healthy."""

    def shutdown(self, reason: str | None = None) -> None:
        self._pool.shutdown()


def main() -> int:
    from vllm.entrypoints.access_log import set_up_logging
    from vllm.entrypoints.api_processes.process import APPLICATION
    from vllm.entrypoints.api_processes.serve import serve_together
    from vllm.entrypoints.launcher import serve
    from vllm.entrypoints.listening import bound
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import FrontEndArgs
    from vllm.utils.fork_server import fork_server
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=_NUM_BLOCKS, help="of 16 tokens")
    parser.add_argument("--max-model-len", type=int, default=_MAX_MODEL_LEN)
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--reasoning-tokens", type=int, default=0, help="open each reply, if any")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--tool-call-parser")
    options = parser.parse_args()
    args = FrontEndArgs(
        reasoning_parser=options.reasoning_parser or "",
        tool_call_parser=options.tool_call_parser,
        enable_auto_tool_choice=options.tool_call_parser is not None,
        host="127.0.0.1",
        port=options.port,
        disable_uvicorn_access_log=True,
        api_server_count=options.api_server_count,
    )
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(
            Path(directory),
            options.max_num_seqs,
            options.step_ms / 1e3,
            options.num_blocks,
            options.max_model_len,
            options.reasoning_tokens,
        )
        if args.api_server_count != 1:
            with fork_server(APPLICATION), bound(args, shared=True) as first:
                return serve_together(first, args, config, TokenExecutor)
        set_up_logging(args)
        with bound(args) as sock:
            return serve(
                sock,
                args,
                lambda: AsyncLLM(config, TokenExecutor),
                lambda engine: build_app(engine, args),
            )


if __name__ == "__main__":
    sys.exit(main())
