# SPDX-License-Identifier: Apache-2.0
"""The frame of a decoder-only model: embedding, pre-norm layers, final norm.

The residual stream is kept apart from the branch outputs, so that a branch is added by the matmul
that makes it or together with the norm that follows, whichever the platform has a kernel for.
Either way the sum is a tensor that nothing overwrites: capturing the residual stream costs nothing.
"""

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config.current import get_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.utils import (
    LayerFactory,
    MissingLayer,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

Hidden = Tensor | tuple[Tensor, list[Tensor]] | IntermediateTensors

#: what a pipeline stage hands to the next: the residual stream, and captured ones by their place
#: among all that are asked for
STREAM, CAPTURED = "hidden_states", "captured.{}"


#: what a layer may have behind its second norm
FeedForward = GatedMLP | MixtureOfExperts


class DecoderLayer(nn.Module):
    """A token mixer and a feed-forward network, each behind a norm.

    Subclasses create the four modules, naming the mixer as their checkpoint does, and give `mix`,
    or `mix_stream` where the mixer's projections take the norm and the addition along.
    """

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    mlp: FeedForward

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """The token mixer, `[tokens, hidden] -> [tokens, hidden]`."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} gives neither `mix` nor `mix_stream`")

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        """`input_layernorm` and the mixer: the stream with the mixer's branch, and the sum
        `[tokens, hidden]` that it came with."""
        normed, total = self.input_layernorm.enter(stream)
        mixed = self.mix(positions, normed)
        if not isinstance(mixed, Tensor):
            found = f"{type(self).__name__}.mix returned a {type(mixed).__name__}"
            raise TypeError(f"{found}; it has to return a tensor [tokens, hidden]")
        return ResidualStream(total, mixed), total

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        """The stream after this layer, and the sum `[tokens, hidden]` that it came with."""
        stream, total = self.mix_stream(positions, stream)
        return self.mlp.after_norm(self.post_attention_layernorm, stream)[0], total


class DecoderModel(nn.Module, EagleModelMixin):
    """Embedding, layers, final norm; of these a pipeline stage has consecutive layers, the first
    one the embedding and the last one the norm, with the embedding if the head is tied to it.

    `eps`: the final norm's, of families whose config does not call it `rms_norm_eps`.
    """

    embed_tokens: nn.Module
    norm: RMSNorm | MissingLayer

    def __init__(
        self,
        config: PretrainedConfig,
        layer_fn: LayerFactory,
        norm: type[RMSNorm],
        prefix: str,
        *,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        stage = get_pp_group()
        self.embed_tokens = MissingLayer()
        if stage.is_first_rank or _embedding_is_head():
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, layer_fn, prefix=maybe_prefix(prefix, "layers")
        )
        self.norm = MissingLayer()
        if stage.is_last_rank:
            self.norm = norm(config.hidden_size, config.rms_norm_eps if eps is None else eps)
        #: layers that steps skip: see `LeavesOutLayers`
        self.left_out: frozenset[int] = frozenset()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""
        return self.embed_tokens(input_ids)

    def embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """`inputs_embeds [tokens, hidden]`, or without any the embeddings of `input_ids`."""
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None, "give input_ids, inputs_embeds or intermediate_tensors"
        return self.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Hidden:
        """Normalised hidden states `[tokens, hidden]`, with the captured streams if any are set.

        A pipeline stage but the first takes `intermediate_tensors` instead of ids, and one but the
        last returns such: the stream and what was captured so far. `positions [tokens]` int64.
        """
        aux: list[Tensor] = []
        if intermediate_tensors is not None:
            total = intermediate_tensors[STREAM]
            aux += [
                intermediate_tensors[CAPTURED.format(i)]
                for i in range(len(intermediate_tensors) - 1)
            ]
        else:
            total = self.embedded(input_ids, inputs_embeds)
        stream = ResidualStream(total)
        for index in range(self.start_layer, self.end_layer):
            layer = self.layers[index]
            if not isinstance(layer, DecoderLayer):
                raise TypeError(
                    f"layer {index} is a {type(layer).__name__}, which is no DecoderLayer; derive "
                    "it from that, or give the model a `model_class` of its own"
                )
            if index not in self.left_out:
                stream, total = layer(positions, stream)
            self._maybe_add_hidden_state(aux, index, total, None)
        if isinstance(self.norm, MissingLayer):
            captured = {CAPTURED.format(i): one for i, one in enumerate(aux)}
            return IntermediateTensors({STREAM: stream.total, **captured})
        hidden, total = self.norm.enter(stream)
        self._maybe_add_hidden_state(aux, len(self.layers), total, None)
        return (hidden, aux) if self.aux_hidden_state_layers else hidden


def _embedding_is_head() -> bool:
    """Whether this is the last stage of a model whose head is its embedding."""
    config = get_current_vllm_config()
    return get_pp_group().is_last_rank and config.model_config.hf_config.tie_word_embeddings
