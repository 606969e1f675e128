# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over the paged cache."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import get_forward_context
from vllm.kernels.attention import QueryRows
from vllm.kernels.fp8 import FP8
from vllm.kernels.rotary import RotaryProblem
from vllm.kernels.tuning.shapes import AttentionShape, KernelShapes, ReadsTiles
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.cache_scales import CacheScales
from vllm.model_executor.layers.fill import fill
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm.utils.torch_utils import dtype_name, get_kv_cache_torch_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec


class Attention(nn.Module, AttentionLayerBase, ReadsTiles):
    """Attention of this process's heads; keeps keys and values per token.

    Causal, unless the tokens of a request are a block (`rows`). Two entries. `forward(query, key,
    value)` takes finished projections. `forward_qkv` takes the fused qkv projection and does head
    norms, rotation, cache write and attention in one go.

    `sinks [heads]` fp32 are a parameter of whoever projects: see `AttentionProblem`.
    """

    decode_launches = 2

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: object | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_backend: type[AttentionBackend] | None = None,
        *,
        rows: QueryRows = QueryRows.TOKENS,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("quant_config", quant_config),
            ("logits_soft_cap", logits_soft_cap),
        ):
            if value is not None:
                raise VLLMValidationError(f"{prefix or 'attention'}: {name} is not supported yet")
        config = get_current_vllm_config()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = per_layer_sliding_window
        self.kv_cache_dtype = kv_cache_torch_dtype(config)
        self.attn_backend = get_attn_backend(head_size, self.kv_cache_dtype, attn_backend)
        self._check_capabilities(rows, sinks)
        self.impl = self.attn_backend.get_impl_cls()(
            num_heads, head_size, scale, self.num_kv_heads, per_layer_sliding_window
        )
        self.impl.rows = rows
        self.has_sinks = sinks is not None
        if sinks is not None:
            self.impl.sinks = sinks
        self.cache_scales = self._make_cache_scales()
        self.layer_name = prefix
        #: tokens after a row's own that its keys and values depend on (a draft head's: 1)
        self.cache_lookahead = 0

    @property
    def decode_flops_per_element(self) -> float:
        return 2.0 * self.num_heads / self.num_kv_heads

    def _check_capabilities(self, rows: QueryRows, sinks: Tensor | None) -> None:
        """VLLMValidationError for what the layer asks of the backend and that does not have."""
        backend = self.attn_backend
        for asked, supported, what in (
            (self.sliding_window is not None, backend.supports_sliding_window, "sliding windows"),
            (rows is not QueryRows.TOKENS, backend.supports_row_blocks, "blocks of draft rows"),
            (sinks is not None, backend.supports_sinks, "attention sinks"),
        ):
            if asked and not supported:
                raise VLLMValidationError(
                    f"the attention backend {backend.name} has no {what}; use "
                    "--attention-backend PAGED"
                )

    def _make_cache_scales(self) -> CacheScales | None:
        if self.kv_cache_dtype is not FP8:
            return None
        if not self.attn_backend.supports_fp8_cache:
            raise VLLMValidationError(
                f"the attention backend {self.attn_backend.name} does not read a float8 cache; "
                "use --attention-backend PAGED or --kv-cache-dtype auto"
            )
        scales = CacheScales()
        self.impl.cache_scales = scales
        return scales

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query [tokens, heads * head_size]`, `key, value [tokens, kv_heads * head_size]`
        (or with heads as a dimension), already normalised and rotated.

        Returns `[tokens, heads * head_size]`.
        """
        tokens = query.shape[0]
        heads = query.reshape(tokens, self.num_heads, self.head_size)
        out = torch.empty_like(heads)
        self.with_connector(
            self._cache_and_attend,
            heads,
            key.reshape(tokens, self.num_kv_heads, self.head_size),
            value.reshape(tokens, self.num_kv_heads, self.head_size),
            out,
        )
        return out.flatten(1)

    @graph_break
    def _cache_and_attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        slots = get_forward_context().slot_mapping[self.layer_name]
        k_scale, v_scale = self._written_scales()
        current_platform.kernels.write_kv_cache(
            key, value, self.kv_cache, slots, k_scale=k_scale, v_scale=v_scale
        )
        self._attend(query, None, out)

    def _written_scales(self) -> tuple[float, float]:
        """Of keys and values."""
        scales = self.cache_scales
        return (1.0, 1.0) if scales is None else (scales.k, scales.v)

    def forward_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Attention of a fused projection: see `RotaryProblem` for `qkv`.

        Returns `[tokens, heads, head_size]`, with `gated` times the gate's sigmoid.
        """
        out = qkv.new_empty(qkv.shape[0], self.num_heads, self.head_size)
        self.with_connector(
            self._rotate_and_attend, qkv, positions, cos_sin, q_norm, k_norm, gated, out
        )
        return out

    def write_kv(
        self, kv: Tensor, positions: Tensor, cos_sin: Tensor, k_norm: RMSNorm | None
    ) -> None:
        """Keep keys and values without attending: `kv [tokens, 2 * kv_heads * head_size]`."""
        self.with_connector(self._rotate_and_keep, kv, positions, cos_sin, k_norm)

    def _rotate_and_keep(
        self, kv: Tensor, positions: Tensor, cos_sin: Tensor, k_norm: RMSNorm | None
    ) -> None:
        self._rotate_and_cache(kv, positions, cos_sin, None, k_norm, False, num_heads=0)

    def _rotate_and_attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        gated: bool,
        out: Tensor,
    ) -> None:
        query = self._rotate_and_cache(qkv, positions, cos_sin, q_norm, k_norm, gated)
        self._attend(query, self._gate(qkv, gated), out)

    def _gate(self, qkv: Tensor, gated: bool) -> Tensor | None:
        """`[tokens, heads, head_size]`: each query head of `qkv` is `[q | gate]`."""
        if not gated:
            return None
        heads = qkv[:, : 2 * self.num_heads * self.head_size]
        return heads.unflatten(-1, (self.num_heads, 2, self.head_size))[:, :, 1]

    def _rotate_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        gated: bool,
        num_heads: int | None = None,
    ) -> Tensor:
        """The query `[tokens, heads, head_size]` of `num_heads` (None: all); slots lie at a fixed
        address, so a graph may hold this."""
        k_scale, v_scale = self._written_scales()
        norm = q_norm or k_norm
        problem = RotaryProblem(
            qkv,
            positions,
            cos_sin,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self.kv_cache,
            get_forward_context().slot_mapping[self.layer_name],
            num_heads=self.num_heads if num_heads is None else num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            gated=gated,
            eps=0.0 if norm is None else norm.variance_epsilon,
            one_plus=False if norm is None else norm.one_plus,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return current_platform.kernels.qk_norm_rope_cache(problem)

    @graph_break
    def _attend(self, query: Tensor, gate: Tensor | None, out: Tensor) -> None:
        fill(self.impl.forward, query, self.kv_cache, self.metadata(), out, gate)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        kind: Callable[..., AttentionSpec] = FullAttentionSpec
        if self.sliding_window is not None:
            kind = partial(SlidingWindowSpec, sliding_window=self.sliding_window)
        return kind(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_dtype,
            lookahead=self.cache_lookahead,
        )

    def kernel_shapes(self) -> KernelShapes:
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        shape = AttentionShape(*heads, self.sliding_window, self.has_sinks)
        return KernelShapes(attention=(shape,))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, head_size={self.head_size}"


def kv_cache_torch_dtype(vllm_config: VllmConfig, never_fp8: str | None = None) -> torch.dtype:
    """Element type of cached keys and values; raises ValueError for one no kernel reads.
    `never_fp8`: the name of attention that reads float8 on no device."""
    asked = vllm_config.cache_config.cache_dtype
    model_dtype: torch.dtype = vllm_config.model_config.dtype
    chosen = get_kv_cache_torch_dtype(asked, model_dtype)
    if chosen is FP8 and never_fp8 is not None:
        raise VLLMValidationError(
            f"{never_fp8} does not read a float8 cache; use --kv-cache-dtype auto"
        )
    if chosen is FP8 and not current_platform.supports_fp8_cache:
        raise VLLMValidationError(
            f"kv cache dtype {asked!r} needs a CUDA device of compute capability 8.9 or higher; "
            "use auto"
        )
    if chosen is not FP8 and chosen is not model_dtype:
        supported = ["auto", dtype_name(model_dtype)]
        if never_fp8 is None and current_platform.supports_fp8_cache:
            supported.append("fp8")
        raise VLLMValidationError(
            f"kv cache dtype {asked!r} is not supported with a {model_dtype} model; "
            f"supported: {', '.join(supported)}"
        )
    return chosen
