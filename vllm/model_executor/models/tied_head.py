# SPDX-License-Identifier: Apache-2.0
"""The output head that a checkpoint has although its config ties it to the embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm import decisions
from vllm.model_executor.models.weights import LM_HEAD, Weights, WeightsError
from vllm.model_executor.parameter import WeightShapeError, default_weight_loader
from vllm.model_executor.utils import get_weight_attr

#: the embedding's name in the model
EMBEDDING = "model.embed_tokens.weight"
_PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class TiedHead:
    """Beside the embedding a copy is of no use; of two that differ nothing says which one is meant.
    A head alone is the embedding, as for transformers. Quantised ones are not compared.

    `embedding`: the parameter that is also the head, with its `weight_loader`.
    """

    def __init__(self, embedding: Tensor) -> None:
        self._embedding = embedding
        self._head: Tensor | None = None

    def placed(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, which have the model's names: the head last, as the embedding where
        there is none."""
        head: Tensor | None = None
        has_embedding = False
        for name, tensor in weights:
            if name == LM_HEAD and tensor.dtype in _PLAIN_DTYPES:
                head = tensor.cpu()
                continue
            has_embedding |= name == EMBEDDING
            yield name, tensor
        if head is None:
            return
        if has_embedding:
            self._head = self._like_embedding(head)
            yield LM_HEAD, head
            return
        why = "tie_word_embeddings ties them, and the checkpoint has no other"
        decisions.record("embedding", LM_HEAD, why, EMBEDDING)
        yield EMBEDDING, head

    def _like_embedding(self, head: Tensor) -> Tensor:
        """This rank's part of `head [vocab, hidden]`, in the embedding's dtype."""
        part = torch.empty_like(self._embedding, device="cpu")
        try:
            get_weight_attr(self._embedding, "weight_loader", default_weight_loader)(part, head)
        except WeightShapeError:
            return head[:0]
        return part

    def check(self) -> None:
        """After the embedding is loaded: WeightsError for a head that differs from it."""
        if self._head is not None and not torch.equal(self._head, self._embedding.cpu()):
            override = "--hf-overrides '{\"tie_word_embeddings\": false}'"
            raise WeightsError(
                [
                    f"{LM_HEAD} is not the embedding, to which tie_word_embeddings of config.json "
                    f"ties it; give {override} to use it, or remove it from the checkpoint"
                ]
            )
