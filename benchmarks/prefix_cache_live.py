# SPDX-License-Identifier: Apache-2.0
"""The agent trace on a running engine, beside what the simulation says of the same requests.

    python -m benchmarks.prefix_cache_live [--memory-mb 64] [--concurrency 2] ...
    python -m benchmarks.prefix_cache_live --model benchmarks/qwen3_5_4b --load-format dummy \\
        --hf-overrides {} --scale 1 --memory-mb 20000,40000 --concurrency 16   # on a GPU
    python -m benchmarks.prefix_cache_live --conversations 10 --memory-mb 300 --no-write \\
        --speculative-config '{"method": "eagle3", "num_speculative_tokens": 5,
                               "model": "examples/models/tiny-qwen3_5-code-eagle3"}'

Replays `agent_trace.py` with lengths scaled by `--scale` (a quarter: the state of the small model
weighs as much as 400 tokens, that of Qwen3.5-4B as much as 1,600). Answers are sampled by the
model, as long as the trace says, and become the history of later turns. Writes
docs/measurements/prefix_cache_live.json and the table in docs/state_memory.md (`--no-write` only
prints). What is found depends on nothing but the trace; seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.agent_trace import TraceConfig, TraceRequest, make_trace, summary
from benchmarks.prefix_cache_policies import Policy, policies
from benchmarks.prefix_cache_simulation import Cache, Prefixes, Result, Simulation
from benchmarks.report import prefix_cache_live_rows, rendered
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.batch_defaults import UsageContext
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import RecurrentManager
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-qwen3_5-code"
DATA = ROOT / "docs" / "measurements" / "prefix_cache_live.json"
GUIDE = ROOT / "docs" / "state_memory.md"
#: policies of the simulation that are shown
SHOWN = ("aligned", "every block", "exact")


def scaled(config: TraceConfig, scale: float) -> TraceConfig:
    """The same trace with all lengths multiplied."""
    names = ("preamble_median", "message_median", "tool_result_median", "answer_median")
    changes: dict[str, Any] = {n: max(round(getattr(config, n) * scale), 1) for n in names}
    return dataclasses.replace(config, **changes, max_tokens=round(config.max_tokens * scale))


def parents(trace: Sequence[TraceRequest]) -> list[int | None]:
    """For every request the one whose tokens, answer included, its prompt continues."""
    found: list[int | None] = []
    for i, later in enumerate(trace):
        best: int | None = None
        for j, earlier in enumerate(trace[:i]):
            n = len(earlier.tokens)
            if (
                n < later.num_prompt
                and (best is None or n >= len(trace[best].tokens))
                and np.array_equal(earlier.tokens, later.tokens[:n])
            ):
                best = j
        found.append(best)
    return found


# ---- the live run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A request with the tokens it really had, and how many the engine found. `known`: tokens of
    its prompt that the request it continues had computed."""

    request: TraceRequest
    known: int
    found: int
    lost: int
    reason: str | None


@dataclass
class LiveRun:
    """Of one engine: requests in the order they were sent; bytes of checkpoints nobody uses."""

    memory_bytes: int
    arena_bytes: int
    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0
    end_checkpoint_bytes: int = 0
    peak_checkpoint_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Sums over the requests."""
        lost: Counter[str] = Counter()
        by_kind: dict[str, list[int]] = {}
        for one in self.served:
            if one.reason is not None:
                lost[one.reason] += one.lost
            kind = by_kind.setdefault(one.request.kind, [0, 0])
            kind[0] += one.found
            kind[1] += one.request.num_prompt
        prompt = sum(one.request.num_prompt for one in self.served)
        found = sum(one.found for one in self.served)
        later = [one for one in self.served if one.known]
        return {
            "memory_bytes": self.memory_bytes,
            "arena_bytes": self.arena_bytes,
            "prompt_tokens": prompt,
            "found_tokens": found,
            "hit_rate": found / prompt,
            "lost_tokens": dict(sorted(lost.items())),
            "later_turns": len(later),
            "later_turns_complete": sum(one.found >= one.known for one in later),
            "end_checkpoint_bytes": self.end_checkpoint_bytes,
            "peak_checkpoint_bytes": self.peak_checkpoint_bytes,
            "seconds": round(self.seconds, 2),
            "by_kind": by_kind,
        }


class Replay:
    """Sends a trace to one engine: at most `concurrency` requests at a time, the next in the trace
    whose history is there first."""

    def __init__(self, engine: LLMEngine, trace: Sequence[TraceRequest], concurrency: int) -> None:
        core = engine.engine_core
        assert isinstance(core, InprocClient)
        scheduler = core.engine_core.scheduler
        assert isinstance(scheduler, Scheduler)
        manager = scheduler.kv_cache_manager
        self._engine = engine
        self._trace = trace
        self._parents = parents(trace)
        self._concurrency = concurrency
        self._vocab_size = engine.model_config.get_vocab_size()
        self._pages = manager.block_pool.pages
        self._strides = {
            m.group_id: manager.kv_cache_config.plan.block_stride(m.group_id)
            for m in manager.managers
            if isinstance(m, RecurrentManager)
        }
        plan = manager.kv_cache_config.plan
        memory = engine.vllm_config.cache_config.kv_cache_memory_bytes
        assert memory is not None
        self.result = LiveRun(memory, (plan.num_pages - 1) * plan.page_bytes)
        #: tokens of requests that ended, prompt and answer
        self._tokens: dict[int, np.ndarray] = {}
        self._served: dict[int, Served] = {}

    def run(self) -> LiveRun:
        """The whole trace."""
        waiting = list(range(len(self._trace)))
        sent: list[int] = []
        started = time.perf_counter()
        with tqdm(total=len(waiting), unit="request", leave=False) as progress:
            while waiting or len(self._served) < len(sent):
                while len(sent) - len(self._served) < self._concurrency:
                    index = next((i for i in waiting if self._is_ready(i)), None)
                    if index is None:
                        break
                    waiting.remove(index)
                    sent.append(index)
                    self._send(index)
                for output in self._engine.step():
                    if output.finished:
                        self._take(output)
                        progress.update()
                self._count_checkpoints()
        self.result.seconds = time.perf_counter() - started
        self.result.served = [self._served[index] for index in sent]
        return self.result

    def _is_ready(self, index: int) -> bool:
        """A new answer to an old prompt is asked for once the old answer is there."""
        parent = self._parents[index]
        again = self._trace[index].kind == "regenerated"
        return (parent is None or parent in self._tokens) and not (
            again and index - 1 not in self._tokens
        )

    def _send(self, index: int) -> None:
        request, parent = self._trace[index], self._parents[index]
        history = self._tokens[parent] if parent is not None else np.empty(0, np.int32)
        own = request.tokens[len(history) : request.num_prompt] % self._vocab_size
        num_answer = len(request.tokens) - request.num_prompt
        params = SamplingParams(
            max_tokens=num_answer, ignore_eos=True, seed=index, detokenize=False, temperature=1.0
        )
        prompt = TokensPrompt(
            prompt_token_ids=np.concatenate([history, own]).tolist(),
            cache_checkpoints=list(request.marks),
            return_cache_report=True,
        )
        self._engine.add_request(str(index), prompt, params)

    def _take(self, output: RequestOutput) -> None:
        index = int(output.request_id)
        asked, parent = self._trace[index], self._parents[index]
        assert output.prompt_token_ids is not None
        tokens = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids], np.int32)
        if len(tokens) != len(asked.tokens):
            raise RuntimeError(f"request {index} ended early: {output.outputs[0].finish_reason}")
        self._tokens[index] = tokens
        report = output.cache_report
        self._served[index] = Served(
            dataclasses.replace(asked, tokens=tokens),
            0 if parent is None else self._trace[parent].num_computed,
            output.num_cached_tokens or 0,
            report.lost_tokens if report is not None else 0,
            report.reason if report is not None else None,
        )

    def _count_checkpoints(self) -> None:
        held = sum(
            len(self._pages.groups[group].idle) * stride for group, stride in self._strides.items()
        )
        self.result.end_checkpoint_bytes = held
        self.result.peak_checkpoint_bytes = max(self.result.peak_checkpoint_bytes, held)


# ---- comparison --------------------------------------------------------------------------------


def simulate(
    live: LiveRun, known: Sequence[Policy], concurrency: int, memory: float
) -> list[Result]:
    """What the requests of a live run find in simulated caches of `memory` bytes, of which the
    states of running requests take their part."""
    results = []
    for policy in known:
        free = memory - concurrency * policy.sizes.state_bytes
        names = [Prefixes(one.request, policy.sizes.unit) for one in live.served]
        result = Result(policy.name, None if math.isinf(memory) else memory)
        results.append(Simulation(policy, Cache(free)).run(names, result))
    return results


def make_engine(
    args: argparse.Namespace,
    longest: int,
    memory_bytes: int,
    caching: bool,
    drafter: dict[str, Any] | None = None,
) -> LLMEngine:
    """For requests of up to `longest` tokens, in this process, so that its memory can be seen."""
    engine_args = EngineArgs(
        model=args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=args.concurrency,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=caching,
        kv_cache_memory_bytes=memory_bytes,
        hf_overrides=json.loads(args.hf_overrides),
        speculative_config=drafter,
    )
    return LLMEngine(engine_args.create_engine_config(UsageContext.LLM_CLASS), multiprocess=False)


def replay(
    args: argparse.Namespace,
    trace: Sequence[TraceRequest],
    memory_bytes: int,
    caching: bool,
    drafter: dict[str, Any] | None = None,
) -> tuple[LiveRun, list[Policy]]:
    """One live run, and the policies with the bytes of its model."""
    longest = max(len(request.tokens) for request in trace)
    engine = make_engine(args, longest, memory_bytes, caching, drafter)
    known = policies(engine.vllm_config, args.max_num_batched_tokens)
    try:
        return Replay(engine, trace, args.concurrency).run(), known
    finally:
        engine.shutdown()


def compare(args: argparse.Namespace, config: TraceConfig) -> dict[str, Any]:
    """Live runs at every size of the arena, each with its simulations; then one without cache,
    for its time."""
    trace = make_trace(config)
    runs = []
    sizes = [round(float(size) * 1e6) for size in args.memory_mb.split(",")]
    for size in sizes:
        live, known = replay(args, trace, size, caching=True)
        shown = [policy for policy in known if policy.name in SHOWN]
        run = live.as_json()
        for key, memory in (("simulated", float(live.arena_bytes)), ("unlimited", math.inf)):
            results = simulate(live, shown, args.concurrency, memory)
            run[key] = {
                result.policy: {
                    "hit_rate": result.hit_rate,
                    "peak_checkpoint_bytes": result.peak_checkpoint_bytes,
                    "by_kind": result.by_kind,
                }
                for result in results
            }
        if args.speculative_config is not None:
            drafter = json.loads(args.speculative_config)
            drafted, _ = replay(args, trace, size, caching=True, drafter=drafter)
            run["drafted"] = drafted.as_json() | {"method": drafter["method"]}
        runs.append(run)
    uncached_seconds = None
    if not args.no_uncached:
        uncached, _ = replay(args, trace, max(sizes), caching=False)
        uncached_seconds = round(uncached.seconds, 2)
    return {
        "model": Path(args.model).name,
        "trace": {**dataclasses.asdict(config), **summary(trace), "scale": args.scale},
        "concurrency": args.concurrency,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "uncached_seconds": uncached_seconds,
        "runs": runs,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--load-format", default="auto", help="`dummy`: random weights.")
    parser.add_argument("--memory-mb", default="64", help="Sizes of the arena.")
    parser.add_argument("--concurrency", type=int, default=2, help="Requests at a time.")
    overrides = '{"max_position_embeddings": 16384}'
    parser.add_argument("--hf-overrides", default=overrides, help="Of the model's config.json.")
    parser.add_argument("--speculative-config", help="A drafter: the trace with it, too (JSON).")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--scale", type=float, default=0.25, help="Of the trace's lengths.")
    parser.add_argument("--conversations", type=int, default=80)
    parser.add_argument("--active", type=int, default=4, help="Conversations at a time.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-uncached", action="store_true", help="Leave out the run without.")
    parser.add_argument("--no-write", action="store_true", help="Only print.")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    base = TraceConfig(seed=args.seed, conversations=args.conversations, active=args.active)
    data = compare(args, scaled(base, args.scale))
    print(prefix_cache_live_rows(data))
    for run in data["runs"]:
        print(
            f"{run['memory_bytes'] / 1e6:g} MB: {run['found_tokens']:,} of "
            f"{run['prompt_tokens']:,} prompt tokens found, lost {run['lost_tokens']}, "
            f"{run['later_turns_complete']} of {run['later_turns']} later turns found all there "
            f"was, checkpoints {run['end_checkpoint_bytes'] / 1e6:.1f} MB at the end; "
            f"{run['seconds']:.1f} s, without cache {data['uncached_seconds'] or 'not timed'}"
        )
        if (drafted := run.get("drafted")) is not None:
            share = drafted["found_tokens"] / run["found_tokens"]
            print(
                f"  with {drafted['method']}: {drafted['found_tokens']:,} of "
                f"{drafted['prompt_tokens']:,} found, {share:.2%} of what is without it, "
                f"lost {drafted['lost_tokens']}; {drafted['seconds']:.1f} s"
            )
    if not args.no_write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        GUIDE.write_text(rendered(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
