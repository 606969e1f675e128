# SPDX-License-Identifier: Apache-2.0
"""OLMo-hybrid: gated delta nets with negative eigenvalues behind norms, and attention before one.

Recurrent layers are pre-norm. Attention layers read the bare stream and norm what they add to it;
their q and k norms span all heads, and released checkpoints do not rotate.
"""

from dataclasses import replace

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import divide, per_rank
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.hybrid import HybridForCausalLM, only_silu
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp, head_dim, rotary
from vllm.model_executor.models.weights import WeightsMapper


class WholeNormAttention(nn.Module, Communicates):
    """Projections, norms of all of q and all of k (OLMo 2, section 2), rotation if any, attention.

    A rank gathers the others' heads for the norms, so its bits are those of one rank.

    Raises:
        ValueError: kv heads that the ranks cannot share out evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary_emb: RotaryEmbedding | None,
        *,
        bias: bool = False,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        self.tp_size = get_tensor_model_parallel_world_size()
        heads = per_rank("attention heads", num_heads, self.tp_size)
        kv_heads = per_rank("key/value heads under a norm", num_kv_heads, self.tp_size)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(num_heads * head_dim, eps)
        self.k_norm = RMSNorm(num_kv_heads * head_dim, eps)
        self.rotary_emb = rotary_emb
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.attn = Attention(heads, head_dim, head_dim**-0.5, kv_heads, prefix=f"{prefix}.attn")

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """`positions [tokens]` int64, `hidden_states [tokens, hidden] -> [tokens, hidden]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: queries and keys meet for their norms."""
        if self.tp_size == 1:
            return []
        q, k, _ = self.sizes
        return [Collective("all-gather", "norms", size * element_bytes) for size in (q, k)]

    def _normalised(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """This rank's part of the norm over all ranks' `x [tokens, n]`."""
        if self.tp_size == 1:
            return norm.normalise(x)
        whole = norm.normalise(tensor_model_parallel_all_gather(x.contiguous()))
        size = divide(whole.shape[1], self.tp_size)
        return whole.narrow(1, get_tensor_model_parallel_rank() * size, size)


#: of the gated norm, whatever the config's is
_GATED_NORM_EPS = 1e-5


def delta_net_shape(config: PretrainedConfig) -> GatedDeltaNetShape:
    """The recurrent mixer; transitions may have eigenvalues down to -1."""
    return replace(
        qwen3_5.delta_net_shape(config),
        eps=_GATED_NORM_EPS,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )


def rotation(vllm_config: VllmConfig, head_dim: int) -> RotaryEmbedding | None:
    """None where the config has no `rope_theta`, as in released checkpoints."""
    rope = vllm_config.model_config.hf_text_config.rope_parameters
    if rope is None or rope.get("rope_theta") is None:
        return None
    return rotary(vllm_config, head_dim)


class OlmoHybridRecurrentLayer(DecoderLayer):
    """A gated delta net and a gated MLP, each behind a norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        only_silu(config.hidden_act, prefix)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(
            delta_net_shape(config), f"{prefix}.linear_attn", quant_config=vllm_config.quant_config
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.linear_attn.after_norm(self.input_layernorm, positions, stream)


class OlmoHybridAttentionLayer(DecoderLayer):
    """Attention and a gated MLP, each before a norm (OLMo 2, arXiv 2501.00656, section 2)."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        size = head_dim(config)
        self.self_attn = WholeNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            size,
            config.rms_norm_eps,
            rotation(vllm_config, size),
            bias=config.attention_bias,
            prefix=f"{prefix}.self_attn",
            quant_config=vllm_config.quant_config,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        total = stream.total
        mixed = self.post_attention_layernorm.normalise(self.self_attn(positions, total))
        middle = total + mixed
        fed = self.post_feedforward_layernorm.normalise(self.mlp(middle))
        return ResidualStream(middle, fed), total


def new_layer(vllm_config: VllmConfig, prefix: str = "") -> DecoderLayer:
    """The layer of the kind that the config lists."""
    kind = vllm_config.model_config.hf_text_config.layer_types[extract_layer_index(prefix)]
    if kind == "linear_attention":
        return OlmoHybridRecurrentLayer(vllm_config, prefix)
    if kind == "full_attention":
        return OlmoHybridAttentionLayer(vllm_config, prefix)
    supported = ["full_attention", "linear_attention"]
    raise VLLMValidationError(f"{prefix} has type {kind!r}; supported: {supported}")


class OlmoHybridForCausalLM(HybridForCausalLM):
    """`OlmoHybridForCausalLM` checkpoints, convolutions of q, k and v apart or as one."""

    layer_class = new_layer
    recurrent_shape = staticmethod(delta_net_shape)
    fused_names = (
        ("conv1d", "q_conv1d", 0),
        ("conv1d", "k_conv1d", 1),
        ("conv1d", "v_conv1d", 2),
        *(
            (fused, name, shard)
            for fused, names in (
                ("in_proj_ba", ("b_proj", "a_proj")),
                ("in_proj_qkvz", ("q_proj", "k_proj", "v_proj", "g_proj")),
                ("in_proj", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")),
            )
            for shard, name in enumerate(names)
        ),
        *DecoderForCausalLM.fused_names,
    )
    weights_mapper = WeightsMapper(
        orig_to_new_substr={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
            ".linear_attn.o_proj.": ".linear_attn.out_proj.",
            ".linear_attn.o_norm.": ".linear_attn.norm.",
        }
    )
