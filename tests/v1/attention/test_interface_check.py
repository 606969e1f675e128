# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a backend's author: each is an error that names what, and what instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.harness import make_config
from tests.tiny_models import tiny_model
from vllm.config import set_current_vllm_config
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.attention import QueryRows
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.paged import (
    PagedAttentionBackend,
    PagedAttentionImpl,
    PagedAttentionMetadataBuilder,
)
from vllm.v1.attention.group_backend import group_backend
from vllm.v1.attention.interface_check import check_backend, check_implementation
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.step_metadata import StateGroup


class NoAbility(PagedAttentionBackend):
    name = "PLAIN"
    supports_sliding_window = False
    supports_row_blocks = False


class Alone:
    """Derives from nothing."""


class Lacking(AttentionBackend):
    name = "LACKING"


class Nameless(AttentionBackend):
    get_builder_cls = PagedAttentionBackend.get_builder_cls
    get_impl_cls = PagedAttentionBackend.get_impl_cls


class OnlyBuilder(AttentionBackend):
    name = "BUILDER"
    get_builder_cls = PagedAttentionBackend.get_builder_cls


class Misspelled(PagedAttentionBackend):
    supports_sliding_windows = True


class WrongType(PagedAttentionBackend):
    max_prefills_in_graph = True


class NoStaticMethod(PagedAttentionBackend):
    def get_impl_cls(self) -> type[Any]:  # type: ignore[override]
        return PagedAttentionImpl


class NoClass(PagedAttentionBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return PagedAttentionImpl(1, 1, 1.0, 1)


def with_builder(builder: type[Any]) -> type[AttentionBackend]:
    class WithBuilder(PagedAttentionBackend):
        @staticmethod
        def get_builder_cls() -> Any:
            return builder

    return WithBuilder


def with_impl(impl: type[Any]) -> type[AttentionBackend]:
    class WithImpl(PagedAttentionBackend):
        @staticmethod
        def get_impl_cls() -> Any:
            return impl

    return WithImpl


class NoBuild(AttentionMetadataBuilder[Any]):
    """Says `build_metadata`, or nothing."""


class BuildsFromMore(PagedAttentionMetadataBuilder):
    def build(self, prefix_len: int, common: Any) -> Any:  # type: ignore[override]
        return common


class Runs(PagedAttentionImpl):
    forward = None  # type: ignore[assignment]


class NoGate(PagedAttentionImpl):
    def forward(self, query: Any, kv_cache: Any, metadata: Any, out: Any) -> None:  # type: ignore[override]
        """Fills `out`."""


class FewSizes:
    def __init__(self, num_heads: int, head_size: int, scale: float) -> None:
        """Knows neither key/value heads nor windows."""


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (Alone, "is a class derived from AttentionBackend, not <class '.*Alone'>"),
        (Lacking, "Lacking lacks get_builder_cls; docs/adding_a_backend.md"),
        (OnlyBuilder, "OnlyBuilder lacks get_impl_cls; docs/adding_a_backend.md"),
        (Nameless, "Nameless has no `name`: set it in the class"),
        (Misspelled, "supports_sliding_windows, .*it asks for .*supports_sliding_window,"),
        (WrongType, "max_prefills_in_graph is True; it has to be an int or None"),
        (
            NoStaticMethod,
            "get_impl_cls is a static method without parameters: write @staticmethod above it",
        ),
        (NoClass, "get_impl_cls returned PagedAttentionImpl.*; it has to return a class"),
        (with_builder(Alone), "Alone does not derive from AttentionMetadataBuilder"),
        (with_builder(NoBuild), "NoBuild lacks build"),
        (with_builder(BuildsFromMore), r"BuildsFromMore.build cannot be called with \(common\)"),
        (with_impl(Runs), r"Runs has no method `forward`; it has to have forward\(query, kv_cache"),
        (with_impl(NoGate), r"NoGate.forward cannot be .* out, gate\) by position: too many"),
        (with_impl(FewSizes), "FewSizes.__init__ cannot be called with .*num_kv_heads, sliding"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_class_that_the_engine_cannot_call(backend: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_implementation(backend)


def test_a_layer_kinds_own_backend_needs_no_implementation() -> None:
    check_backend(OnlyBuilder)
    check_implementation(PagedAttentionBackend)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"per_layer_sliding_window": 8}, "sliding windows"),
        ({"rows": QueryRows.WHOLE_BLOCK}, "blocks of draft rows"),
    ],
)
def test_what_a_layer_asks_for_has_to_be_declared(asked: dict[str, Any], what: str) -> None:
    with (
        set_current_vllm_config(make_config(tiny_model("llama"))),
        pytest.raises(ValueError, match=f"PLAIN has no {what}; use --attention-backend PAGED"),
    ):
        Attention(4, 32, 1.0, prefix="layer", attn_backend=NoAbility, **asked)


def test_a_layers_own_backend_is_checked_as_one_that_was_asked_for() -> None:
    with (
        set_current_vllm_config(make_config(tiny_model("llama"))),
        pytest.raises(ValueError, match="NoGate.forward cannot be called"),
    ):
        Attention(4, 32, 1.0, prefix="layer", attn_backend=with_impl(NoGate))


class ReturnsOutput(PagedAttentionImpl):
    def forward(self, query: Any, *args: Any) -> Any:
        return query


def test_an_implementation_that_returns_its_output_has_not_filled_it() -> None:
    with set_current_vllm_config(make_config(tiny_model("llama"))):
        layer = Attention(4, 32, 1.0, 2, prefix="layer", attn_backend=with_impl(ReturnsOutput))
    layer.kv_cache = torch.zeros(2, 2, 16, 2, 32)
    context = ForwardContext({}, {"layer": None}, {"layer": torch.arange(3)}, num_tokens=3)
    q, kv = torch.zeros(3, 128), torch.zeros(3, 64)
    with (
        set_forward_context(context),
        pytest.raises(TypeError, match="ReturnsOutput.forward returned a Tensor; it has to fill"),
    ):
        layer(q, kv, kv)


class BuildsNothing(PagedAttentionMetadataBuilder):
    def build(self, common: Any) -> Any:
        self.built = common


def test_a_builder_returns_its_metadata() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    builder = BuildsNothing(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    common: Any = np.zeros(0)
    with pytest.raises(TypeError, match="BuildsNothing.build returned NoneType; it has to return"):
        StateGroup(["layer"], spec, builder).build(common)


def test_layers_that_share_a_group_have_one_backend() -> None:
    layers: Any = {
        name: SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        for name, backend in (("a", PagedAttentionBackend), ("b", NoAbility))
    }
    assert group_backend(["b"], layers) is NoAbility
    with pytest.raises(ValueError, match="a and b keep the same.*PAGED and PLAIN; give both"):
        group_backend(["a", "b"], layers)
