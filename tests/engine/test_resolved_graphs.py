# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs are captured: the mode, and the sizes of decode and piecewise graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.checkpoints import TRANSFER, extraction
from tests.engine.decision_records import record
from vllm.config import CompilationConfig, CUDAGraphMode, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.compilation import default_piecewise_sizes
from vllm.engine.resolve import resolve
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that captures graphs."""
    monkeypatch.setattr(type(current_platform), "supports_graphs", True)


def test_graphs_are_off_on_the_cpu() -> None:
    config = resolve(VllmConfig())
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []
    made = record(config, "cudagraph_mode")
    assert made is not None and made.instead_of == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize(
    ("level", "given", "eager", "result"),
    [
        (0, None, False, "NONE"),
        (1, None, False, "PIECEWISE"),
        (2, None, False, "FULL_AND_PIECEWISE"),
        (3, None, False, "FULL_AND_PIECEWISE"),
        (0, "FULL", False, "FULL_AND_PIECEWISE"),
        (0, "PIECEWISE", False, "PIECEWISE"),
        (0, "FULL_AND_PIECEWISE", False, "FULL_AND_PIECEWISE"),
        (2, "FULL_DECODE_ONLY", False, "FULL_DECODE_ONLY"),
        (2, "NONE", False, "NONE"),
        (2, "FULL", True, "NONE"),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_graph_mode(llama: str, level: int, given: Any, eager: bool, result: str) -> None:
    config = resolve(
        VllmConfig(
            model_config=ModelConfig(llama, enforce_eager=eager),
            compilation_config=CompilationConfig(cudagraph_mode=given),
            optimization_level=level,
        )
    )
    compilation = config.compilation_config
    assert compilation.cudagraph_mode is not None
    assert compilation.cudagraph_mode.name == result
    if given not in (None, result):
        made = record(config, "cudagraph_mode")
        assert made is not None and made.instead_of == given
    assert bool(compilation.cudagraph_capture_sizes) == (result != "NONE")
    assert bool(compilation.decode_capture_sizes) == ("FULL" in result)
    assert bool(compilation.piecewise_capture_sizes) == ("PIECEWISE" in result)
    limit = record(config, "piecewise graphs")
    assert (limit is not None) == ("PIECEWISE" in result)
    assert limit is None or "2048 tokens" in limit.chosen


@pytest.mark.usefixtures("graphs")
def test_capture_sizes_never_exceed_a_decode_batch(llama: str) -> None:
    scheduler = SchedulerConfig(max_num_seqs=20)
    config = resolve(VllmConfig(scheduler_config=scheduler))
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes == [1, 2, 4, 8, 16, 20]
    assert compilation.piecewise_capture_sizes == default_piecewise_sizes(2048)
    assert compilation.max_cudagraph_capture_size == 2048
    model = ModelConfig(llama)
    both = resolve(
        VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(max_num_seqs=20),
            speculative_config=extraction(model),
            kv_transfer_config=TRANSFER,  # type: ignore[arg-type]
        )
    )
    # Extraction verifies no draft, so its decodes are one token per request too.
    assert both.compilation_config.decode_capture_sizes[-1] == 20


@pytest.mark.parametrize(
    ("mode", "decode", "pieces"),
    [
        ("FULL_AND_PIECEWISE", [2, 16], [2, 16, 100]),
        ("PIECEWISE", [], [2, 16, 100]),
        ("NONE", [], []),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_given_sizes_serve_both_kinds_of_steps(
    mode: str, decode: list[int], pieces: list[int]
) -> None:
    config = resolve(
        VllmConfig(
            scheduler_config=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=512),
            compilation_config=CompilationConfig(
                cudagraph_mode=mode, cudagraph_capture_sizes=[100, 2, 16]
            ),
        )
    )
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes == decode
    assert compilation.piecewise_capture_sizes == pieces
    assert compilation.cudagraph_capture_sizes == sorted({*decode, *pieces})


@pytest.mark.parametrize(
    ("mode", "size", "flag"),
    [
        ("FULL_DECODE_ONLY", 21, "--max-num-seqs 20"),
        ("FULL_AND_PIECEWISE", 513, "--max-num-batched-tokens 512"),
        ("PIECEWISE", 513, "--max-num-batched-tokens 512"),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_a_size_that_no_step_has_is_an_error(mode: str, size: int, flag: str) -> None:
    def build(largest: int) -> VllmConfig:
        return resolve(
            VllmConfig(
                scheduler_config=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=512),
                compilation_config=CompilationConfig(
                    cudagraph_mode=mode, cudagraph_capture_sizes=[1, largest]
                ),
            )
        )

    with pytest.raises(VLLMValidationError, match=f"asks for {size}, but with {flag}"):
        build(size)
    build(size - 1)


@pytest.mark.usefixtures("graphs")
def test_the_largest_size_bounds_both_kinds_of_steps() -> None:
    config = resolve(
        VllmConfig(
            scheduler_config=SchedulerConfig(max_num_seqs=200, max_num_batched_tokens=4096),
            compilation_config=CompilationConfig(max_cudagraph_capture_size=100),
        )
    )
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes[-1] == 100
    assert compilation.piecewise_capture_sizes == [8, 16, 32, 64, 100]


def test_settings_of_a_compiler_are_recorded() -> None:
    config = resolve(VllmConfig(compilation_config=CompilationConfig(mode=3, custom_ops=["all"])))
    made = record(config, "torch.compile")
    assert made is not None and "mode, custom_ops" in made.why
