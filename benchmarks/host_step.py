# SPDX-License-Identifier: Apache-2.0
"""CPU time of each host part of a decode step.

    python -m benchmarks.host_step [--batch 256,1024] [--output FILE]

The device is a model that computes nothing, on the CPU; scheduler, worker, messages and front end
are the real ones, run one after the other on one thread. Prints milliseconds of CPU time per step:
the best and the median of the rounds' means (another process on the machine only adds).

Beside the steps, on threads of the core's process, outputs are encoded ("encode", part of every
step) and requests decoded ("receive", once per request). "steals" is what this takes of the core's
interpreter: `encode` per step, as a share of the core's parts, and `receive` per request.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig

from benchmarks.api_overhead import stream_counts
from benchmarks.token_source import train_tokenizer
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.plain_outputs import PlainOutputsPacker, PlainOutputsUnpacker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaAttentionBackendEnum,
    MambaSpec,
)
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.residual_tap import ResidualTap

_BLOCK_SIZE = 16
_ARENA_BYTES_PER_REQUEST = 1 << 17
_DEVICE = torch.device("cpu")
_PARTS = ("schedule", "worker", "results", "update", "encode", "decode", "front end")
#: parts that share the core process's interpreter; the front end is another process
_CORE_PARTS = ("schedule", "worker", "results", "update", "encode")
#: of the core's process, once per request
_RECEIVE = "receive"


class NoModel(nn.Module):
    """Every logit is zero, so every token is 0."""

    vocab_size = 256

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(len(input_ids), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.expand(len(hidden), self.vocab_size)


class NoMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Metadata that nobody reads."""

    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        return AttentionMetadata()


class NoBackend(AttentionBackend):
    name = "none"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[AttentionMetadata]]:
        return NoMetadataBuilder


class NoLayer(AttentionLayerBase):
    """Keeps state of some kind and never touches it."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        self.kv_cache = None

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self._spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return NoBackend


def make_config(batch: int, max_model_len: int) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(
            model="benchmark",
            hf_config=LlamaConfig(
                architectures=["LlamaForCausalLM"], vocab_size=NoModel.vocab_size
            ),
            max_model_len=max_model_len,
            skip_tokenizer_init=True,
        ),
        cache_config=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler_config=SchedulerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
            async_scheduling=True,
        ),
        device_config=DeviceConfig(device="cpu"),
    )


def make_layers() -> dict[str, AttentionLayerBase]:
    """One group of attention and one of recurrent state a hundred times as large as a block of the
    other, as in the hybrid models."""
    state = MambaSpec(
        block_size=_BLOCK_SIZE,
        shapes=((6400,),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    attention = FullAttentionSpec(
        block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return {"layers.0": NoLayer(state), "layers.1": NoLayer(attention)}


class Host:
    """All host parts of one engine; `seconds[part]`: CPU time of every step."""

    def __init__(self, batch: int, prompt_len: int, num_steps: int, directory: Path) -> None:
        config = make_config(batch, prompt_len + num_steps + 64)
        self.runner = ModelRunner(config, _DEVICE)
        self.runner.layers = make_layers()
        self.runner.model = NoModel()
        self.runner.tap = ResidualTap(self.runner.model, [])
        specs = self.runner.get_kv_cache_spec()
        cache = get_kv_cache_configs(config, [specs], [batch * _ARENA_BYTES_PER_REQUEST])[0]
        self.runner.initialize_kv_cache(cache)
        self.scheduler = AsyncScheduler(config, cache)
        train_tokenizer(directory)
        self.front_end = OutputProcessor(AutoTokenizer.from_pretrained(directory))
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.requests = MsgpackDecoder(list[EngineCoreRequest])
        self.packer, self.unpacker = PlainOutputsPacker(), PlainOutputsUnpacker()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.in_flight: deque[
            tuple[SchedulerOutput, ModelRunnerOutput | AsyncModelRunnerOutput]
        ] = deque()
        for index in range(batch):
            self._add(index, prompt_len, num_steps + 32)

    def _add(self, index: int, prompt_len: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        prompt = np.random.default_rng(index).integers(2, NoModel.vocab_size, prompt_len).tolist()
        request = EngineCoreRequest(f"{index}-{index:032d}", prompt, params, time.time())
        self.front_end.add_request(request, str(index), None)
        hasher = get_request_block_hasher(_BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        frame = self.encoder.encode([request])
        with self._timed(_RECEIVE):
            (arrived,) = self.requests.decode(frame)
            received = Request.from_engine_core_request(arrived, hasher)
        self.scheduler.add_request(received)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[part].append(time.thread_time() - start)

    def step(self) -> int:
        """One step of the core's loop with two steps in flight; returns the tokens scheduled."""
        with self._timed("schedule"):
            output = self.scheduler.schedule()
        with self._timed("worker"):
            launched = self.runner.execute_model(output)
        self.in_flight.append((output, launched))
        if len(self.in_flight) == 2:
            self._collect()
        return output.total_num_scheduled_tokens

    def _collect(self) -> None:
        output, result = self.in_flight.popleft()
        with self._timed("results"):
            if isinstance(result, AsyncModelRunnerOutput):
                result = result.get_output()
        with self._timed("update"):
            produced = self.scheduler.update_from_output(output, result)
        with self._timed("encode"):
            frame = self.encoder.encode(self.packer.pack(produced[0]))
        with self._timed("decode"):
            message = self.decoder.decode(frame)
            self.unpacker.unpack(message)
        with self._timed("front end"):
            self.front_end.process_outputs(message, IterationStats())


def measure(
    batch: int, prompt_len: int, num_rounds: int, steps_per_round: int
) -> dict[str, list[float]]:
    """Mean seconds per step of every round, by part; of "receive", seconds of every request."""
    rounds: dict[str, list[float]] = {part: [] for part in _PARTS}
    with tempfile.TemporaryDirectory() as directory:
        host = Host(batch, prompt_len, (num_rounds + 1) * steps_per_round + 64, Path(directory))
        rounds[_RECEIVE] = host.seconds.pop(_RECEIVE)
        while host.scheduler.waiting:
            host.step()
        for _ in range(steps_per_round):
            host.step()
        gc.collect()
        gc.freeze()
        for _ in range(num_rounds):
            host.seconds.clear()
            for _ in range(steps_per_round):
                assert host.step() == batch, "not a step of decodes only"
            for part in _PARTS:
                rounds[part].append(mean(host.seconds[part]))
    return rounds


def figures(batch: int, rounds: dict[str, list[float]]) -> dict[str, float]:
    """Medians: milliseconds per step of each part, of the scheduler and of the core; what encoding
    takes of the core's interpreter, per token and as a share; microseconds per received request."""
    result = {f"{part}_ms": median(rounds[part]) * 1e3 for part in _PARTS}
    totals = [sum(parts) for parts in zip(*(rounds[part] for part in _CORE_PARTS), strict=True)]
    scheduler = [sum(both) for both in zip(rounds["schedule"], rounds["update"], strict=True)]
    result["scheduler_ms"] = median(scheduler) * 1e3
    result["core_ms"] = median(totals) * 1e3
    result["encode_us_per_token"] = result["encode_ms"] * 1e3 / batch
    result["encode_share"] = result["encode_ms"] / result["core_ms"]
    result["receive_us_per_request"] = median(rounds[_RECEIVE]) * 1e6
    return {name: round(value, 4) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=stream_counts, default=[256, 1024], help="comma list")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=32, help="decode steps per round")
    parser.add_argument("--output", type=Path, help="file for the medians")
    args = parser.parse_args()
    results = []
    for batch in args.batch:
        rounds = measure(batch, args.prompt_len, args.rounds, args.steps)
        result = figures(batch, rounds)
        results.append({"batch": batch, **result})
        print(f"batch {batch}, milliseconds of CPU time per decode step (best, median)")
        for part in _PARTS:
            print(f"  {part:<10}{min(rounds[part]) * 1e3:8.3f}{median(rounds[part]) * 1e3:8.3f}")
        for name in ("scheduler", "core"):
            print(f"  {name:<18}{result[f'{name}_ms']:8.3f}")
        print(
            f"  steals: encode {result['encode_us_per_token']:.2f} µs per token, "
            f"{result['encode_share']:.1%} of the core; "
            f"receive {result['receive_us_per_request']:.0f} µs per request"
        )
    if args.output:
        args.output.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
