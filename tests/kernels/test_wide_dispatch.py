# SPDX-License-Identifier: Apache-2.0
"""When many tokens are multiplied by `vllm_cuda`, in which tiles, and when by cuBLAS."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels import cuda, wide_shapes
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.wide import HopperWideOps
from vllm.kernels.wide_shapes import CACHED_TOKENS, SPANS, TILES, Span, wide_tile

BF16 = torch.bfloat16
H200 = 132


@pytest.fixture
def _spans(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {(8, 64): (Span(20, 30, 2), Span(40, 41, 0))}
    monkeypatch.setattr(wide_shapes, "SPANS", spans)


@pytest.mark.usefixtures("_spans")
def test_tiles_follow_from_the_spans() -> None:
    chosen = {m: wide_tile(m, 8, 64) for m in (19, 20, 30, 31, 40, 41, 42)}
    assert chosen == {19: None, 20: 2, 30: 2, 31: None, 40: 0, 41: 0, 42: None}
    assert wide_tile(20, 64, 8) is None


def test_the_spans_are_in_order_and_name_tiles() -> None:
    for spans in SPANS.values():
        edges = [edge for span in spans for edge in (span.least, span.most + 1)]
        assert edges == sorted(edges) and all(span.least <= span.most for span in spans)
    assert {span.tile for spans in SPANS.values() for span in spans} == set(range(len(TILES)))


def test_short_spans_are_one_wave() -> None:
    """Up to 512 tokens no multiprocessor makes a second tile, and few are idle."""
    for (n, _), spans in SPANS.items():
        for span in spans:
            if span.most <= 512:
                tile = TILES[span.tile]
                tiles = -(-span.most // tile.tokens) * -(-n // tile.outputs)
                assert 0.9 * H200 <= tiles <= H200


def test_groups_of_tokens_stay_in_the_cache() -> None:
    for tile in TILES:
        tokens = tile.group * tile.tokens * tile.rows
        assert CACHED_TOKENS - tile.tokens * tile.rows < tokens <= CACHED_TOKENS


class Library:
    """`vllm_cuda` in plain torch; notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, bool, int, int]] = []
        self.wide_linear = self

    def default(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor | None,
        overlap: bool,
        tile: int,
        group: int,
    ) -> Tensor:
        self.calls.append((len(x), residual is not None, overlap, tile, group))
        out = torch.nn.functional.linear(x, weight)
        return out if residual is None else out + residual


@pytest.mark.usefixtures("_spans")
@pytest.mark.parametrize("capturing", [False, True])
def test_what_is_in_a_span_is_one_launch(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    monkeypatch.setattr(cuda.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    library = Library()
    monkeypatch.setattr(torch.ops, "vllm_cuda", library, raising=False)
    kernels = CudaKernels(wide=HopperWideOps())
    torch.manual_seed(0)
    x, weight, residual = (torch.randn(*s).to(BF16) for s in ((20, 64), (8, 64), (20, 8)))
    plain = torch.nn.functional.linear(x, weight)
    assert torch.equal(kernels.linear(x, weight, None), plain)
    stream = kernels.linear_add(x, weight, None, residual)
    assert stream.branch is None and torch.equal(stream.residual, plain + residual)
    group = TILES[2].group
    assert library.calls == [(20, added, capturing, 2, group) for added in (False, True)]


@pytest.mark.usefixtures("_spans")
def test_what_is_not_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(torch.ops, "vllm_cuda", library, raising=False)
    kernels = CudaKernels(wide=HopperWideOps())
    weight = torch.ones(8, 64, dtype=BF16)
    for tokens, bias, dtype in (
        (19, None, BF16),
        (20, torch.ones(8, dtype=BF16), BF16),
        (20, None, torch.float16),
    ):
        x = torch.ones(tokens, 64, dtype=dtype)
        plain = torch.nn.functional.linear(x, weight.to(dtype), bias)
        assert torch.equal(kernels.linear(x, weight.to(dtype), bias), plain)
    assert not library.calls
    with pytest.raises(ValueError, match="use torch's linear"):
        HopperWideOps().linear(torch.ones(19, 64, dtype=BF16), weight, False)
