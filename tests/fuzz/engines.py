# SPDX-License-Identifier: Apache-2.0
"""The engines under test: small models with options drawn so that everything happens often."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.extraction_options import extraction
from tests.fuzz.workload import MAX_MODEL_LEN
from tests.tiny_models import tiny_model
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.engine.batch_defaults import UsageContext
from vllm.utils import start_method

#: one family per kind of state: attention alone, with a window, with recurrent state
FAMILIES = ("llama", "qwen3_sliding", "qwen3_5")
#: pages that hold a request of any length here with little to spare, so that some are preempted
_FEW_PAGES = {"llama": 19, "qwen3_sliding": 40, "qwen3_5": 28}


def make_arguments(family: str, storage: Path | None, **options: Any) -> dict[str, Any]:
    """Keywords of `EngineArgs` and `LLM`; among the options `drafter` is a speculative config, and
    `tier` a transfer config that goes beside what extraction needs."""
    drafter, tier = options.pop("drafter", None), options.pop("tier", None)
    made: dict[str, Any] = {} if storage is None else extraction(storage)
    if drafter is not None and storage is None:
        made["speculative_config"] = drafter
    elif drafter is not None:
        made["speculative_config"]["drafter"] = drafter
    if tier is not None:
        own = made.get("kv_transfer_config")
        made["kv_transfer_config"] = tier if own is None else _together(own, tier)
    return {
        "model": str(tiny_model(family)),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "enable_sleep_mode": True,
        "kv_cache_memory_bytes": 64 << 20,
        **made,
        **options,
    }


def _together(*transfers: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(transfers)},
    }


def make_config(family: str, storage: Path | None, **options: Any) -> VllmConfig:
    """An engine's configuration."""
    args = EngineArgs(**make_arguments(family, storage, **options))
    return args.create_engine_config(UsageContext.LLM_CLASS)


def draw_options(
    rng: random.Random, family: str, extracts: bool, ranks: bool = False
) -> dict[str, Any]:
    """How the engine cuts, orders and keeps work; never what it computes. `ranks`: whether it may
    have workers of its own."""
    max_num_seqs = rng.choice((1, 2, 5, 8, 8))
    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice((16, 23, 64, 128, 512)),
        "long_prefill_token_threshold": rng.choice((0, 0, 7, 33)),
        "async_scheduling": rng.random() < 0.6,
        "enable_prefix_caching": rng.random() < 0.85,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "stream_interval": rng.choice((1, 1, 4)),
        "watermark": rng.choice((0.0, 0.0, 0.1)),
        "seed": rng.randrange(1 << 30),
    }
    if rng.random() < 0.5:
        options["drafter"] = _draw_drafter(rng)
    if rng.random() < 0.6:
        has_layers = "drafter" in options and options["drafter"]["method"] != "ngram"
        pages = _FEW_PAGES[family] * (1 + extracts + has_layers)
        options["num_gpu_blocks_override"] = pages + rng.randrange(pages)
    own = random.Random(options["seed"])
    if options["enable_prefix_caching"] and own.random() < 0.5:
        options["tier"] = _draw_tier(own)
    if ranks and own.random() < 0.3:
        options["tensor_parallel_size"] = 2
    elif ranks and own.random() < 0.3:
        options["data_parallel_size"] = 2
    return options


def _draw_tier(rng: random.Random) -> dict[str, Any]:
    """Host memory that gives back what the device has forgotten, often too small."""
    extra = {
        "cpu_bytes_to_use": rng.choice((2, 8)) << 20,
        "eviction_policy": rng.choice(("lru", "arc")),
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _draw_drafter(rng: random.Random) -> dict[str, Any]:
    """Without layers, or with a state of one kind or another."""
    num_drafts = {"num_speculative_tokens": rng.choice((1, 3, 5))}
    draft = rng.choice((None, "llama", "qwen3_5"))
    if draft is None:
        lengths = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return {"method": "ngram", **lengths, **num_drafts}
    return {"method": "draft_model", "model": str(tiny_model(draft)), **num_drafts}


@contextmanager
def forked_cores() -> Iterator[None]:
    """Core processes are forked, although this process has threads: all of them are idle then, and
    a spawned process would import everything again."""
    with (
        mock.patch.dict("os.environ", VLLM_WORKER_MULTIPROC_METHOD="fork"),
        mock.patch.object(start_method, "_other_threads", list),
    ):
        yield
