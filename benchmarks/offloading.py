# SPDX-License-Identifier: Apache-2.0
"""What host memory behind the device's cache costs and gives.

    python -m benchmarks.offloading                       # all parts, on the device there is
    python -m benchmarks.offloading --parts copy,reload   # some of them

- copy: blocks from the device to host memory, digests included, against one page-locked copy of
  the same bytes;
- serve: tokens per second of requests that find nothing, with the tier and without;
- reload: seconds to the first token of a prompt that is computed and of one that is loaded;
- trace: prompt tokens found of the agent trace with a part of the memory that holds everything and
  a host tier behind it, against all of that memory, and against the part alone; where that finds
  nearly as much, the trace says nothing about the tier, and the benchmark says so;
- policies: prompt tokens that the trace finds by the host tier's order of eviction, with parts of
  the memory on the device and as much in the host; simulated, with blocks of attention alone.

On a GPU the model has the dimensions of Qwen3.5-4B and random weights; on a CPU it is a small one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.agent_trace import TraceConfig, TraceRequest, make_trace
from benchmarks.inprocess import core_of, scheduler_of
from benchmarks.prefix_cache_live import Replay, scaled
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import (
    Arc,
    EvictionPolicy,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import MovedBlock, StoreJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.transfers import Transfers
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.batch_defaults import UsageContext
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
)
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import ArenaPlan, GroupPlan, KVCacheConfig

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("copy", "serve", "reload", "trace", "policies")
#: part of the ideal hits from which on the device needs no tier
ENOUGH = 0.9
ON_GPU = current_platform.device_type == "cuda"


# ---- engines -----------------------------------------------------------------------------------


def make_engine(args: argparse.Namespace, host_bytes: int = 0, **changes: Any) -> LLMEngine:
    """An engine in this process, with a host tier if it has bytes."""
    settings: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format,
        "hf_overrides": json.loads(args.hf_overrides),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 2048,
        **changes,
    }
    if host_bytes:
        settings["kv_offloading_size"] = host_bytes / 2**30
    config = EngineArgs(**settings).create_engine_config(UsageContext.LLM_CLASS)
    return LLMEngine(config, multiprocess=False)


def generate(engine: LLMEngine, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Seconds until all prompts have their answers."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
    current_platform.synchronize()
    began = time.perf_counter()
    for i, token_ids in enumerate(prompts):
        engine.add_request(f"{began}-{i}", TokensPrompt(prompt_token_ids=token_ids), params)
    ended = began
    while engine.has_unfinished_requests():
        if any(output.finished for output in engine.step()):
            ended = time.perf_counter()  # the engine may go on storing what was computed
    return ended - began


def drain(engine: LLMEngine) -> None:
    while core_of(engine).has_work():
        engine.step()


def tokens_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


# ---- parts -------------------------------------------------------------------------------------


def plan_of(args: argparse.Namespace) -> ArenaPlan:
    """How the model's blocks lie in memory."""
    engine = make_engine(args, max_model_len=1024, enforce_eager=True)
    config: KVCacheConfig = scheduler_of(engine).kv_cache_config
    engine.shutdown()
    return config.plan


def measure_copy(args: argparse.Namespace) -> dict[str, Any]:
    """Blocks of every group, all that fit in `--copy-mb`, group by group."""
    plan = plan_of(args)
    pages = max(2, int(args.copy_mb * 1e6) // plan.page_bytes)
    device = torch.device(current_platform.device_type)
    arena = torch.zeros((pages + 1) * plan.page_bytes, dtype=torch.uint8, device=device)
    host = HostMemory(plan, pages, pinned=ON_GPU)
    host.buffer.zero_()  # its pages are there before anything is timed
    transfers = Transfers(arena, plan, host, None, ended=lambda: None)
    results: dict[str, Any] = {}
    source, target = arena[: pages * plan.page_bytes], host.buffer
    plain = min(_timed_copy(target, source) for _ in range(5))
    results["page-locked copy GB/s"] = target.nbytes / plain / 1e9
    for group, layout in enumerate(plan.groups):
        first, last = layout.blocks_per_page, (pages + 1) * layout.blocks_per_page
        blocks = [MovedBlock(group, block, block, None) for block in range(first, last)]
        seconds = min(_timed_store(transfers, StoreJob(i, blocks)) for i in range(5))
        rate = len(blocks) * layout.block_bytes / seconds / 1e9
        results[f"group {group}: blocks of {layout.block_bytes:,} bytes GB/s"] = rate
        results[f"group {group}: of page-locked copy"] = rate / results["page-locked copy GB/s"]
    stats = transfers.take_stats().data
    results["digest GB/s per thread"] = stats["seal_bytes"] / stats["seal_seconds"] / 1e9
    transfers.close()
    return results


def _timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    current_platform.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    current_platform.synchronize()
    return time.perf_counter() - began


def _timed_store(transfers: Transfers, job: StoreJob) -> float:
    began = time.perf_counter()
    transfers.store(job)
    while not transfers.take_stored()[0]:
        time.sleep(0.0001)
    return time.perf_counter() - began


def measure_serve(args: argparse.Namespace) -> dict[str, Any]:
    """Runs alternate; the best of each counts. No prompt shares a block with another."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(args.repeats):
        for name, host in (("off", 0), ("on", int(args.host_mb * 1e6))):
            engine = make_engine(args, host, max_num_seqs=args.requests, max_model_len=2048)
            generate(engine, [tokens_of(1, 300)], 8)
            prompts = [
                tokens_of(1000 * turn + 10 + i, args.prompt_tokens) for i in range(args.requests)
            ]
            seconds[name].append(generate(engine, prompts, args.answer_tokens))
            engine.shutdown()
    tokens = args.requests * args.answer_tokens
    rates = {name: tokens / min(times) for name, times in seconds.items()}
    return {
        "tokens/s without the tier": rates["off"],
        "tokens/s with it": rates["on"],
        "with / without": rates["on"] / rates["off"],
    }


def measure_reload(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt's end is a checkpoint, so all but its last token come back."""
    length = args.reload_tokens
    engine = make_engine(args, int(args.host_mb * 1e6), max_num_seqs=4, max_model_len=length + 64)
    computed, loaded = [], []
    for turn in range(args.repeats + 1):  # the first turn is a rehearsal
        prompt = tokens_of(turn, length)
        computed.append(generate(engine, [prompt], 1))
        drain(engine)
        if not engine.reset_prefix_cache():
            raise RuntimeError("the device's cache is in use")
        loaded.append(generate(engine, [prompt], 1))
        drain(engine)
    engine.shutdown()
    fastest = min(computed[1:]), min(loaded[1:])
    return {
        f"ms to compute {length:,} tokens": 1e3 * fastest[0],
        "ms to load them": 1e3 * fastest[1],
        "times faster": fastest[0] / fastest[1],
    }


def measure_trace(args: argparse.Namespace) -> dict[str, Any]:
    """First with memory for everything, to know how much that is. Prints whether the trace needs
    the tier at all."""
    trace, sizes = _trace(args)
    ample = int(args.trace_mb * 1e6)
    ideal, used = _replay(args, trace, kv_cache_memory_bytes=ample, **sizes)
    small = {"kv_cache_memory_bytes": int(used * args.device_part), **sizes}
    tier, _ = _replay(args, trace, host_bytes=used, **small)
    alone, _ = _replay(args, trace, **small)
    if (notice := no_difference(ideal, alone)) is not None:
        print(notice)
    return {
        "MB that hold everything": used / 1e6,
        "found with all of it": ideal,
        "part of it on the device": args.device_part,
        "found with the part": alone,
        "found with the part and the tier": tier,
        "of the ideal hits": tier / ideal,
        "of the ideal hits alone": alone / ideal,
    }


def no_difference(ideal: float, alone: float) -> str | None:
    """What to say of a trace of which the device alone finds nearly all."""
    if alone < ENOUGH * ideal:
        return None
    return (
        f"  THIS TRACE DOES NOT DISCRIMINATE: the part of the memory alone finds {alone:.1%}, all "
        f"of it {ideal:.1%}, so the tier has nothing to add; raise --conversations and --active, "
        "or lower --device-part"
    )


def measure_policies(args: argparse.Namespace) -> dict[str, Any]:
    """Every block the device gets is stored in the host, as the connector does it."""
    base = TraceConfig(conversations=args.policy_conversations)
    prompts = [_chain(request) for request in make_trace(scaled(base, args.policy_scale))]
    needed = len({name for chain, _ in prompts for name in chain})
    results: dict[str, Any] = {"requests": len(prompts), "blocks that hold everything": needed}
    results["found with all of it"] = _found(prompts, needed, 1, EvictionPolicy())
    for part in (0.5, 0.25, 0.125):
        pages = int(needed * part)
        for name, policy in (("Lru", EvictionPolicy()), ("Arc", Arc())):
            found = _found(prompts, pages, pages, policy)
            results[f"found with {part} on the device and in the host, {name}"] = found
    return results


def _chain(request: TraceRequest) -> tuple[list[BlockHashWithGroupId], int]:
    """Names of its full blocks, and how many of them are the prompt's."""
    names, parent, size = [], b"", 16
    for start in range(0, request.num_computed - size + 1, size):
        parent = sha256(parent + request.tokens[start : start + size].tobytes()).digest()
        names.append(make_block_hash_with_group_id(BlockHash(parent), 0))
    return names, (request.num_prompt - 1) // size


def _found(
    prompts: Sequence[tuple[list[BlockHashWithGroupId], int]],
    device_pages: int,
    host_pages: int,
    policy: EvictionPolicy,
) -> float:
    """Part of the prompts' blocks that one of both tiers has."""
    plan = ArenaPlan(1, 0, (GroupPlan(1, 1, {}),))
    device, host = Tier(plan, device_pages), Tier(plan, host_pages, policy)
    found = 0
    for chain, num_prompt in prompts:
        hit = 0
        while hit < num_prompt and (device.block_of(chain[hit]) or host.block_of(chain[hit])):
            hit += 1
        found += hit
        for name in chain[:hit]:
            tier = host if (block := device.block_of(name)) is None else device
            block = host.block_of(name) if block is None else block
            assert block is not None
            tier.refresh([block])
        for name in chain:
            if device.block_of(name) is None:
                _store(device, name)
                _store(host, name)
    return found / sum(num_prompt for _, num_prompt in prompts)


def _store(tier: Tier, name: BlockHashWithGroupId) -> None:
    known = tier.block_of(name)
    if known is not None:
        tier.refresh([known])
        return
    block = tier.take(name)
    assert block is not None, "nothing is held"
    tier.publish(block, name, None)
    tier.free_blocks([block])


def _trace(args: argparse.Namespace) -> tuple[list[TraceRequest], dict[str, Any]]:
    """The requests, and the sizes of an engine that takes them."""
    base = TraceConfig(conversations=args.conversations, active=args.active)
    trace = make_trace(scaled(base, args.scale))
    longest = max(len(request.tokens) for request in trace)
    return trace, {"max_model_len": longest, "max_num_seqs": args.concurrency}


def _replay(
    args: argparse.Namespace, trace: Sequence[Any], host_bytes: int = 0, **changes: Any
) -> tuple[float, int]:
    """Part of the prompt tokens found; bytes of pages in use in the end."""
    engine = make_engine(args, host_bytes, **changes)
    try:
        run = Replay(engine, trace, args.concurrency).run().as_json()
        manager = scheduler_of(engine).kv_cache_manager
        plan, pages = manager.kv_cache_config.plan, manager.block_pool.pages
        used = plan.num_pages - pages.num_free_pages
        return run["hit_rate"], used * plan.page_bytes
    finally:
        engine.shutdown()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    small = ROOT / "examples" / "models" / "tiny-qwen3_5-code"
    model = ROOT / "benchmarks" / "qwen3_5_4b" if ON_GPU else small
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help=f"Of {', '.join(PARTS)}.")
    add("--model", default=str(model))
    add("--load-format", default="dummy" if ON_GPU else "auto")
    add("--hf-overrides", default="{}" if ON_GPU else '{"max_position_embeddings": 16384}')
    add("--host-mb", type=float, default=20_000 if ON_GPU else 200, help="The host tier.")
    add("--copy-mb", type=float, default=8_000 if ON_GPU else 100)
    add("--requests", type=int, default=64 if ON_GPU else 4)
    add("--prompt-tokens", type=int, default=512 if ON_GPU else 100)
    add("--answer-tokens", type=int, default=512 if ON_GPU else 60)
    add("--reload-tokens", type=int, default=8192 if ON_GPU else 2048)
    add("--repeats", type=int, default=3)
    add("--conversations", type=int, default=60 if ON_GPU else 20)
    add("--active", type=int, default=24, help="Conversations that go on at a time.")
    add("--device-part", type=float, default=1 / 16, help="Of the memory that holds everything.")
    add("--concurrency", type=int, default=4 if ON_GPU else 2)
    add("--scale", type=float, default=1.0 if ON_GPU else 0.25, help="Of the trace's lengths.")
    add("--policy-conversations", type=int, default=100)
    add("--policy-scale", type=float, default=0.1, help="Of the trace's lengths.")
    add("--trace-mb", type=float, default=60_000 if ON_GPU else 400, help="Holds everything.")
    add("--json", type=Path, help="File for the figures, by part.")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    measures = (measure_copy, measure_serve, measure_reload, measure_trace, measure_policies)
    measure = dict(zip(PARTS, measures, strict=True))
    figures: dict[str, dict[str, Any]] = {}
    for part in args.parts.split(","):
        if part not in measure:
            raise SystemExit(f"no part {part!r}; there are {', '.join(PARTS)}")
        print(part)
        figures[part] = measure[part](args)
        for what, value in figures[part].items():
            print(f"  {what}: {value:,.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
