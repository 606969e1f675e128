# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models with an output head: what families fill in, and how weights are loaded."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layer_errors import name_failing_module
from vllm.model_executor.layer_kinds import repeated_layers
from vllm.model_executor.layers.cache_scales import rename_cache_scales
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.decoder import DecoderModel, Hidden
from vllm.model_executor.models.interfaces import (
    LeavesOutLayers,
    LoadsPart,
    SharesVocabulary,
    SupportsEagle3,
    SupportsPP,
)
from vllm.model_executor.models.tied_head import TiedHead
from vllm.model_executor.models.utils import MissingLayer, maybe_prefix
from vllm.model_executor.models.weights import (
    LM_HEAD,
    AutoWeightsLoader,
    FusedName,
    StackedName,
    WeightsMapper,
    record_unused,
    widened,
)
from vllm.sequence import IntermediateTensors


class CausalLM(nn.Module, LeavesOutLayers, LoadsPart, SharesVocabulary):
    """A `DecoderModel` with an output head; families set the class data."""

    #: called as `layer_class(vllm_config, prefix=...)`: the class of the layers, or a function that
    #: chooses between several
    layer_class: ClassVar[Callable[..., nn.Module]]
    #: of the norm after the layers
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    model_class: ClassVar[type[DecoderModel]] = DecoderModel
    #: `(parameter, checkpoint name, shard id)`: see `AutoWeightsLoader`
    fused_names: ClassVar[tuple[FusedName, ...]] = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    )
    #: tensors of single experts: see `StackedNames`
    stacked_names: ClassVar[tuple[StackedName, ...]] = ()
    #: layers whose weights are never float8 here, whatever the checkpoint has
    widened_names: ClassVar[tuple[str, ...]] = ()
    weights_mapper: WeightsMapper = WeightsMapper()
    #: checkpoint prefixes (after mapping) that are not loaded -> why
    unused_weights: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.prefix = prefix
        self.config = config
        self.dtype = vllm_config.model_config.dtype
        self.weights_mapper = self.names_in(config)
        self.quant_config = vllm_config.quant_config
        if self.quant_config is not None:
            self.quant_config.use_names(self.fused_names, self.weights_mapper)
        self.tied = bool(vllm_config.model_config.hf_config.tie_word_embeddings)
        self.model = self._init_model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), layer_type=layer_type
        )
        self.lm_head: nn.Module = self.model.embed_tokens
        if not get_pp_group().is_last_rank:
            self.lm_head = MissingLayer()
        elif not self.tied:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
        self.logits_processor = LogitsProcessor(config.vocab_size, scale=self.logits_scale(config))

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> DecoderModel:
        """The model without its head; `layer_type` replaces `layer_class`."""
        make_layer = partial(layer_type or type(self).layer_class, vllm_config)
        config = vllm_config.model_config.hf_text_config
        return self.model_class(config, make_layer, self.norm_class, prefix)

    def names_in(self, config: PretrainedConfig) -> WeightsMapper:
        """From the checkpoint's names, of families where they depend on its config."""
        return self.weights_mapper

    @staticmethod
    def logits_scale(config: PretrainedConfig) -> float:
        """What logits are multiplied by."""
        return 1.0

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Hidden:
        """See `DecoderModel.forward`; errors name the module that they come from."""
        try:
            return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        except Exception as error:
            name_failing_module(error, self, self.prefix)
            raise

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`[n, hidden] -> [n, vocab]` in the model dtype."""
        return self.logits_processor(self.lm_head, hidden_states)

    def own_logits(self, hidden_states: Tensor) -> Tensor:
        """See `SharesVocabulary`."""
        return self.logits_processor.own(self.output_head, hidden_states)

    @property
    def output_head(self) -> VocabParallelEmbedding:
        """See `SharesVocabulary`: not of a pipeline stage before the last."""
        assert isinstance(self.lm_head, VocabParallelEmbedding)
        return self.lm_head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; returns the loaded parameters' names. Raises WeightsError."""
        if get_pp_group().world_size > 1:
            weights = ((name, tensor) for name, tensor in weights if self._is_of_stage(name))
        if self.quant_config is not None:
            names = WeightsMapper(orig_to_new_suffix=self.quant_config.suffixes)
            weights = widened(names.apply(weights), self.widened_names, self.dtype)
        weights = rename_cache_scales(weights, self)
        loader = AutoWeightsLoader(
            self,
            fused=self.fused_names,
            stacked=self.stacked_names,
            skip_prefixes=self._without_use(),
        )
        weights = self.weights_mapper.apply(weights)
        embedding = self.model.embed_tokens
        if not self.tied or not isinstance(embedding, VocabParallelEmbedding):
            return loader.load_weights(weights)
        head = TiedHead(embedding.weight)
        loaded = loader.load_weights(head.placed(weights))
        head.check()
        return loaded

    def _without_use(self) -> dict[str, str]:
        """Checkpoint prefixes (after mapping) that are not loaded -> why."""
        unused = dict(self.unused_weights)
        if self.tied:
            unused["lm_head."] = "the output head is tied to the embedding"
        return unused

    @property
    def is_part(self) -> bool:
        """See `LoadsPart`: of a checkpoint with more than this model, or as a pipeline stage."""
        return get_pp_group().world_size > 1 or bool(self._without_use())

    def wants(self, name: str) -> bool:
        """See `LoadsPart`: whether the model has use for the tensor, and no other pipeline stage
        alone has what it is for. A tied head is compared."""
        mapped = self.weights_mapper.map_name(name) or ""
        useless = mapped.startswith((*self._without_use(),)) and mapped != LM_HEAD
        return self._is_of_stage(name) and not useless

    def leave_out(self, names: Sequence[str]) -> None:
        """See `LoadsPart`: what has no use is recorded."""
        unused = self._without_use()
        counts = dict.fromkeys(unused, 0)
        for name in names:
            mapped = self.weights_mapper.map_name(name) or ""
            prefix = next((one for one in unused if mapped.startswith(one)), None)
            if prefix is not None:
                counts[prefix] += 1
        record_unused(counts, unused)

    def _is_of_stage(self, name: str) -> bool:
        mapped = self.weights_mapper.map_name(name) or ""
        parts = mapped.split(".")
        if parts[:2] == ["model", "layers"] and parts[2].isdecimal():
            layer, model = int(parts[2]), self.model
            return model.start_layer <= layer < model.end_layer or layer >= len(model.layers)
        is_head = mapped.startswith("lm_head.")
        if mapped.startswith("model.embed_tokens.") or (is_head and self.tied):
            return isinstance(self.model.embed_tokens, VocabParallelEmbedding)
        if is_head or mapped.startswith("model.norm."):
            return get_pp_group().is_last_rank
        return True

    def repeated_layers(self) -> frozenset[int]:
        """See `LeavesOutLayers`."""
        start, end = self.model.start_layer, self.model.end_layer
        own = [self.model.layers[index] for index in range(start, end)]
        return frozenset(start + place for place in repeated_layers(own, start))

    @contextmanager
    def leaving_out(self, layers: frozenset[int]) -> Iterator[None]:
        """See `LeavesOutLayers`."""
        before, self.model.left_out = self.model.left_out, layers
        try:
            yield
        finally:
            self.model.left_out = before


class CapturedCausalLM(CausalLM, SupportsEagle3):
    """A `CausalLM` whose model returns what it is asked to capture."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        num_layers = self.config.num_hidden_layers
        outside = [i for i in layers if not 0 <= i <= num_layers]
        if outside:
            raise ValueError(
                f"hidden-state layer ids {outside} are outside 0..{num_layers} "
                f"(0 is the embedding, {num_layers} the last layer's output)"
            )
        self.model.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        num_layers = self.config.num_hidden_layers
        return (2, num_layers // 2, num_layers - 3)


class DecoderForCausalLM(CapturedCausalLM, SupportsPP):
    """One residual stream, which can be captured and handed on."""

    def stage_streams(self) -> tuple[int, int]:
        """See `SupportsPP`: the residual stream, and those captured before this stage's layers, or
        before the next one's."""
        model = self.model
        ids = model.aux_hidden_state_layers
        before, after = (
            1 + sum(index < layer for index in ids)
            for layer in (model.start_layer, model.end_layer)
        )
        return before, after
