# SPDX-License-Identifier: Apache-2.0
"""Which devices run the ops of `vllm_cuda`, and that every such choice is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import decisions
from vllm.kernels import cuda_library
from vllm.kernels.attention import hopper
from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.linear import narrow, skinny, swiglu
from vllm.model_executor.layers.fla.ops.gated_delta_rule import hopper as hopper_gdn

NOT_BUILT = "_C_cuda.so is not built: see VLLM_TARGET_DEVICE=cuda"
CHOICES = [
    pytest.param(skinny.OPS, id="skinny"),
    pytest.param(narrow.OPS, id="narrow"),
    pytest.param(hopper_gdn.OPS, id="gdn"),
    pytest.param(hopper.OPS, id="attention"),
    pytest.param(swiglu.OPS, id="swiglu"),
]


@pytest.mark.parametrize("ops", CHOICES)
@pytest.mark.parametrize(
    ("capability", "built", "why"),
    [
        pytest.param((8, 9), True, "this GPU has (8, 9)", id="older"),
        pytest.param((9, 0), False, NOT_BUILT, id="not built"),
        pytest.param((9, 0), True, None, id="Hopper"),
        pytest.param((10, 0), True, "this GPU has (10, 0)", id="later"),
    ],
)
def test_the_choice_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ops: CudaOps,
    capability: tuple[int, int],
    built: bool,
    why: str | None,
) -> None:
    library = tmp_path / "_C_cuda.so"
    if built:
        library.touch()
    loaded: list[None] = []
    monkeypatch.setattr(cuda_library, "CUDA_LIBRARY", library)
    monkeypatch.setattr(cuda_library, "load_cuda_ops", lambda: loaded.append(None))
    expected = why is None or (capability == (10, 0) and not ops.hopper_only)
    assert ops.choose(capability) == expected == (len(loaded) == 1)
    (decision,) = [d for d in decisions.decisions() if d.what == ops.what]
    if expected:
        assert decision.chosen.startswith("vllm_cuda") and decision.instead_of == ops.instead_of
    else:
        assert (decision.chosen, decision.instead_of) == (ops.instead_of, "vllm_cuda")
        assert why is not None and why in decision.why
