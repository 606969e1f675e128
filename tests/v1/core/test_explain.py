# SPDX-License-Identifier: Apache-2.0
"""`explain` says from the configuration alone what a running engine allocates, to the byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extraction_options import extraction
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams, decisions
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_outline import outline_model
from vllm.platforms import current_platform
from vllm.v1.core.arena_sizing import get_kv_cache_configs
from vllm.v1.core.explain import Budget, Explanation, explain
from vllm.v1.core.kv_cache_manager import KVCacheManager

pytestmark = pytest.mark.slow

ARENA_BYTES = 3 << 20
BENCHMARK_MODEL = Path(__file__).parents[3] / "benchmarks" / "qwen3_5_4b"
#: what cannot be computed without a running engine, or says where a number came from
ENGINE_ONLY = {"model", "memory", "decisions", "uses", "requests", "what_ifs"}


def settings_of(case: str, path: Path) -> tuple[str, dict[str, Any]]:
    """`(family, engine arguments)` of a named case."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("llama", {"dtype": "float32"}),
        "llama_fp8": ("llama", {"dtype": "bfloat16", "quantization": "fp8"}),
        "llama_32": ("llama", {"dtype": "bfloat16", "block_size": 32}),
        "qwen3_extract": ("qwen3", {"dtype": "bfloat16", **extraction(path)}),
        "sliding": ("qwen3_sliding", {"dtype": "float32", "max_num_batched_tokens": 64}),
        "hybrid": ("qwen3_5", {"dtype": "float32"}),
        "hybrid_state16": (
            "qwen3_5_tied",
            {"dtype": "bfloat16", "block_size": 48, "mamba_ssm_cache_dtype": "bfloat16"},
        ),
        "hybrid_wrapper": ("qwen3_5_wrapper", {"dtype": "bfloat16"}),
        "hybrid_extract": ("qwen3_5", {"dtype": "float32", **extraction(path, [0, 2, 4])}),
        "compressed": ("deepseek_v4", {"dtype": "float32"}),
    }
    family, options = cases[case]
    limits = {"max_model_len": 256, "max_num_seqs": 4, "enable_prefix_caching": False}
    return family, {**limits, **options}


CASES = (
    "llama", "llama_fp8", "llama_32", "qwen3_extract", "sliding", "hybrid", "hybrid_state16",
    "hybrid_wrapper", "hybrid_extract", "compressed",
)  # fmt: skip


def explained(model: Path, options: dict[str, Any], **kwargs: Any) -> Explanation:
    config = EngineArgs(model=str(model), **options).create_engine_config()
    return explain(config, **kwargs)


def config_only(model: Path, path: Path) -> Path:
    """A directory with nothing of a checkpoint but its config."""
    path.mkdir()
    shutil.copy(model / "config.json", path)
    return path


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, model: Path, options: dict[str, Any]) -> Iterator[LLM]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(str(model), kv_cache_memory_bytes=ARENA_BYTES, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def manager_of(llm: LLM) -> KVCacheManager:
    manager: KVCacheManager = core_of(llm).scheduler.kv_cache_manager
    return manager


def peak_blocks(llm: LLM, prompt: list[int], max_tokens: int) -> list[int]:
    """The most blocks of each group one request ever holds."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    groups = manager_of(llm).block_pool.pages.groups
    llm.llm_engine.add_request("0", {"prompt_token_ids": prompt}, params)
    peaks = [0] * len(groups)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        peaks = [max(peak, group.live) for peak, group in zip(peaks, groups, strict=True)]
    return peaks


@pytest.mark.parametrize("case", CASES)
def test_equals_the_running_engine(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options = settings_of(case, tmp_path)
    model = tiny_model(family)
    lengths = [12, 17, 100]
    report = explained(
        config_only(model, tmp_path / "config"),
        options,
        budget=Budget(arena_bytes=ARENA_BYTES),
        lengths=lengths,
    )
    with engine(monkeypatch, model, options) as llm:
        runner = core_of(llm).executor.worker.model_runner
        config, plan = runner.kv_cache_config, runner.kv_cache_config.plan
        assert (report.page_bytes, report.num_pages) == (plan.page_bytes, plan.num_pages)
        assert report.page_bytes * report.num_pages == runner.arena.buffer.numel()
        assert len(report.groups) == len(config.kv_cache_groups)
        for i, group in enumerate(report.groups):
            spec, names = config.kv_cache_groups[i].kv_cache_spec, plan.groups[i].layer_offsets
            assert group.layers == len(names)
            assert group.data_bytes == group.layers * spec.page_size_bytes
            assert group.stride_bytes == plan.block_stride(i)
            assert group.blocks_per_page == plan.groups[i].blocks_per_page
        tensors = [*runner.model.parameters(), *runner.model.buffers()]
        assert report.memory.weight_bytes == sum(t.numel() * t.element_size() for t in tensors)

        own = llm.explain(lengths)
        assert own.memory.arena_bytes == plan.page_bytes * plan.num_pages
        same = set(Explanation.__dataclass_fields__) - ENGINE_ONLY
        assert {n: getattr(own, n) for n in same} == {n: getattr(report, n) for n in same}
        for ours, theirs in zip(own.requests, report.requests, strict=True):
            assert (ours.blocks, ours.sequences) == (theirs.blocks, theirs.sequences)

        for cost in report.requests:
            # The last token of the output is never computed.
            peaks = peak_blocks(llm, list(range(20, 20 + cost.num_tokens - 3)), 4)
            if case == "sliding" and cost.num_tokens > 64:
                # A bound: where the window's ends lie in their blocks depends on the steps.
                assert cost.blocks[1] - 2 <= peaks[1] <= cost.blocks[1]
                peaks[1] = cost.blocks[1]
            assert tuple(peaks) == cost.blocks


@pytest.mark.parametrize("num_tokens", [12, 100, 250])
def test_as_many_requests_fit_as_it_says(num_tokens: int) -> None:
    family, options = settings_of("hybrid", Path())
    options |= {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
    report = explained(
        tiny_model(family), options, budget=Budget(arena_bytes=1 << 20), lengths=[num_tokens]
    )
    config = EngineArgs(model=str(tiny_model(family)), **options).create_engine_config()
    manager = _manager(config, report)
    held = 0
    while manager.block_pool.can_allocate(list(report.requests[0].blocks)):
        manager.block_pool.get_new_blocks(list(report.requests[0].blocks), [None, None])
        held += 1
    assert held == report.requests[0].sequences > 1


def _manager(config: Any, report: Explanation) -> KVCacheManager:
    specs = outline_model(config).specs
    (kv_config,) = get_kv_cache_configs(config, [specs], [report.memory.arena_bytes])
    limit = config.scheduler_config.max_num_batched_tokens
    return KVCacheManager(kv_config, 256, max_num_batched_tokens=limit, enable_caching=False)


def test_live_pages_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in use while requests run are the sum of their costs."""
    family, options = settings_of("hybrid", Path())
    with engine(monkeypatch, tiny_model(family), options) as llm:
        report = llm.explain([12, 40])
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        for i, cost in enumerate(report.requests):
            tokens = list(range(cost.num_tokens - 1))
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": tokens}, params)
        pages, most = manager_of(llm).block_pool.pages, 0.0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            most = max(most, pages.live_pages)
        total = sum(cost.num_bytes for cost in report.requests)
        assert most * report.page_bytes == pytest.approx(total, abs=0.5)


# ---- the benchmark model -----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(), (2, 16, 29)])
def test_capacity_of_the_4b_model_is_within_3_percent_of_ideal(
    layers: tuple[int, ...], tmp_path: Path
) -> None:
    report = explained(
        BENCHMARK_MODEL,
        extraction(tmp_path, layers) if layers else {},
        budget=Budget(arena_bytes=100 * 10**9),
        lengths=[12, 1000, 32_000, 262_144],
        what_ifs=False,
    )
    assert len(report.groups) == (3 if layers else 2)
    *short, longest = report.requests
    for cost in short:
        assert 0.97 < cost.sequences / cost.ideal_sequences <= 1
    # Of the longest request a dozen fit: whole ones say little, tokens do.
    ideal = longest.ideal_sequences * longest.num_tokens
    assert 0.97 < report.capacity_tokens / ideal <= 1


@pytest.mark.parametrize("layers", [(), (2, 16, 29)])
def test_twelve_tokens_cost_one_block_of_each_group(
    layers: tuple[int, ...], tmp_path: Path
) -> None:
    report = explained(
        BENCHMARK_MODEL,
        extraction(tmp_path, layers) if layers else {},
        budget=Budget(arena_bytes=100 * 10**9),
        what_ifs=False,
    )
    cost = report.requests[0]
    assert cost.num_tokens == 12 and cost.blocks == (1,) * (3 if layers else 2)
    assert cost.num_bytes == sum(group.stride_bytes for group in report.groups)


def test_a_mixture_weighs_all_its_experts() -> None:
    """The 35B benchmark: 64.7 GiB in 16 bits, of which an H200 has room for twice as much."""
    mixture = BENCHMARK_MODEL.with_name("qwen3_5_35b_a3b")
    budget = Budget(device_bytes=141 * 10**9, reserved_bytes=2 * 10**9)
    memory = explained(mixture, {}, budget=budget, what_ifs=False).memory
    assert memory.weight_bytes == pytest.approx(64.7 * 2**30, rel=0.005)
    assert memory.arena_bytes > 40 * 10**9


def test_device_memory_is_shared_with_weights() -> None:
    options = {"gpu_memory_utilization": 0.9}
    budget = Budget(device_bytes=141 * 10**9, reserved_bytes=2 * 10**9)
    memory = explained(BENCHMARK_MODEL, options, budget=budget, what_ifs=False).memory
    assert memory.weight_bytes > 8 * 10**9
    assert memory.arena_bytes == int(0.9 * 141e9) - memory.weight_bytes - 2 * 10**9


def test_device_memory_is_shared_with_uncommitted_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the rings of `max_num_seqs` rows take in all recurrent layers."""
    monkeypatch.setattr(type(current_platform), "defers_commit", True)
    options = {"gpu_memory_utilization": 0.9, "max_num_seqs": 32, "deferred_commit_tokens": 4}
    budget = Budget(device_bytes=141 * 10**9)
    memory = explained(BENCHMARK_MODEL, options, budget=budget, what_ifs=False).memory
    assert memory.ring_bytes == 24 * 32 * 3 * (16 * 128 + 32 * 128 + 32) * 4
    assert memory.arena_bytes == int(0.9 * 141e9) - memory.weight_bytes - memory.ring_bytes


def test_placements_share_their_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a kind once, as many as the placement with most of them has."""
    monkeypatch.setattr(type(current_platform), "defers_commit", True)
    budget = Budget(device_bytes=141 * 10**9)

    def rings(placement: str, **aliases: str) -> int:
        options: dict[str, Any] = {"placement": placement, "placement_alias": aliases}
        supernet = BENCHMARK_MODEL.with_name("super_apriel_15b")
        return explained(supernet, options, budget=budget, what_ifs=False).memory.ring_bytes

    gdn = rings("all-gdn")
    assert gdn > 0
    assert rings("every4th-gdn", all="all-gdn", second="every2nd-gdn") == gdn
    assert rings("all-attention", gdn="all-gdn", kda="every2nd-kda") == gdn + rings("every2nd-kda")


# ---- parts of a report -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_bytes_add_up_to_the_memory(case: str, tmp_path: Path) -> None:
    family, options = settings_of(case, tmp_path)
    memory = ARENA_BYTES + 12_345
    report = explained(
        tiny_model(family), options, budget=Budget(arena_bytes=memory), what_ifs=False,
        lengths=[1, 12, 100, 255],
    )  # fmt: skip
    for use, cost in zip(report.uses, report.requests, strict=True):
        parts = [*use.state_bytes, *(waste.num_bytes for waste in use.wastes), use.left_bytes]
        assert min(parts) >= 0
        assert sum(parts) == memory
        assert use.num_tokens == cost.num_tokens
        assert use.largest_waste.num_bytes == max(w.num_bytes for w in use.wastes)
        assert cost.sequences <= cost.ideal_sequences


def test_what_ifs_equal_the_flags_they_name() -> None:
    family, options = settings_of("hybrid", Path())
    budget = Budget(arena_bytes=ARENA_BYTES)
    report = explained(tiny_model(family), options, budget=budget)
    rows = {row.flag: row for row in report.what_ifs}
    for flag in ("--block-size 64", "--mamba-ssm-cache-dtype bfloat16"):
        name, value = flag.removeprefix("--").replace("-", "_").split()
        changed = {**options, name: int(value) if value.isdigit() else value}
        other = explained(tiny_model(family), changed, budget=budget, what_ifs=False)
        row = rows[flag]
        assert (row.page_bytes, row.num_pages) == (other.page_bytes, other.num_pages)
        assert row.request_bytes == tuple(cost.num_bytes for cost in other.requests)
        assert row.sequences == tuple(cost.sequences for cost in other.requests)
        assert row.page_bytes != report.page_bytes
    assert rows["--block-size 16"].note == "as configured"
    assert rows["--mamba-ssm-cache-dtype float32"].note == "as configured"
    assert "not supported with a torch.float32 model" in rows["--kv-cache-dtype bfloat16"].refused
    if not torch.cuda.is_available():
        assert "convolution's state" in rows["--mamba-cache-dtype bfloat16"].refused


def test_a_float8_cache_halves_keys_and_values_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Captured hidden states and recurrent state keep their dtypes."""
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)
    family, options = settings_of("hybrid_extract", tmp_path)
    options |= {"dtype": "bfloat16"}
    budget = Budget(arena_bytes=ARENA_BYTES)
    wide = explained(tiny_model(family), options, budget=budget)
    narrow = explained(tiny_model(family), {**options, "kv_cache_dtype": "fp8"}, budget=budget)
    data = {group.kind: (group.data_bytes,) for group in wide.groups}
    for group in narrow.groups:
        data[group.kind] += (group.data_bytes,)
    assert data.pop("attention") == (2 * 2 * 16 * 2 * 32, 2 * 16 * 2 * 32)
    assert len(data) == 2 and all(before == after for before, after in data.values())
    (attention,) = [group for group in narrow.groups if group.kind == "attention"]
    assert "float8_e4m3fn" in attention.keeps
    rows = {row.flag: row for row in wide.what_ifs}
    assert rows["--kv-cache-dtype fp8"].page_bytes == narrow.page_bytes


def test_tensor_parallel_sizes_shard_as_the_layers_do() -> None:
    """The tiny hybrid has 2 key/value heads, 2 key heads and 4 value heads: four ranks have copies
    of the keys, in the convolution's state too."""
    family, options = settings_of("hybrid", Path())
    report = explained(tiny_model(family), options, budget=Budget(arena_bytes=ARENA_BYTES))
    rows = {row.flag: row for row in report.what_ifs}
    one, two = rows["--tensor-parallel-size 1"], rows["--tensor-parallel-size 2"]
    assert one.note == "as configured"
    assert two.note == "per device"
    assert two.request_bytes[0] <= one.request_bytes[0] * 0.55
    assert two.sequences[0] > 1.8 * one.sequences[0]
    halved = explained(
        tiny_model(family),
        {**options, "tensor_parallel_size": 2},
        budget=Budget(arena_bytes=ARENA_BYTES),
    )
    assert halved.tensor_parallel_size == 2
    assert tuple(cost.num_bytes for cost in halved.requests) == two.request_bytes
    assert halved.memory.weight_bytes < 0.6 * report.memory.weight_bytes
    assert "some state is replicated" in rows["--tensor-parallel-size 4"].note
    for ranks in (1, 2, 4):
        asked = {**options, "tensor_parallel_size": ranks}
        groups = explained(tiny_model(family), asked).groups
        (keeps,) = [group.keeps for group in groups if group.kind.startswith("recurrent")]
        channels = 2 * 32 // min(ranks, 2) + 96 // ranks
        assert keeps == f"[3, {channels}] float32 + [{4 // ranks}, 24, 16] float32"
    assert "cannot be divided among 8" in rows["--tensor-parallel-size 8"].refused
    dense = explained(tiny_model("llama"), settings_of("llama", Path())[1])
    rows = {row.flag: row for row in dense.what_ifs}
    assert "some state is replicated" in rows["--tensor-parallel-size 4"].note
    sizes = [rows[f"--tensor-parallel-size {n}"].request_bytes for n in (1, 2, 4)]
    assert sizes[0][0] == 2 * sizes[1][0] and sizes[1] == sizes[2]


def test_device_memory_is_divided_anew_per_rank() -> None:
    family, options = settings_of("llama", Path())
    report = explained(tiny_model(family), options, budget=Budget(device_bytes=8 << 20))
    rows = {row.flag: row for row in report.what_ifs}
    grown = rows["--tensor-parallel-size 2"].arena_bytes - report.memory.arena_bytes
    assert 0 < grown < report.memory.weight_bytes // 2


def test_pages_of_the_override() -> None:
    family, options = settings_of("llama", Path())
    report = explained(tiny_model(family), {**options, "num_gpu_blocks_override": 77})
    assert report.num_pages == 77 and report.memory.source == "--num-gpu-blocks-override"


def test_what_cannot_be_explained_says_so() -> None:
    family, options = settings_of("llama", Path())
    for length in (0, 257):
        with pytest.raises(ValueError, match=r"outside 1\.\.max_model_len \(256\)"):
            explained(tiny_model(family), options, lengths=[length])
    with pytest.raises(ValueError, match="less than one page"):
        explained(tiny_model(family), options, budget=Budget(arena_bytes=100))


def test_longest_request_when_the_arena_is_small() -> None:
    family, options = settings_of("llama", Path())
    page = explained(tiny_model(family), options).page_bytes
    report = explained(tiny_model(family), options, budget=Budget(arena_bytes=5 * page))
    assert (report.num_pages, report.longest_request) == (5, 64)


def test_a_running_engine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = settings_of("hybrid", Path())
    with engine(monkeypatch, tiny_model(family), options) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        before = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        config = llm.llm_engine.vllm_config
        known = config.decisions.decisions(), decisions.decisions()
        llm.explain()
        assert config.cache_config.block_size == 16
        assert (config.decisions.decisions(), decisions.decisions()) == known
        after = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert list(after) == list(before)
