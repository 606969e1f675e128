# SPDX-License-Identifier: Apache-2.0
"""The tensors of a target that its drafters share: embedding, output head and final norm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from vllm.exceptions import VLLMValidationError

_SHARED = re.compile(r"(?:model\.|language_model\.)*(lm_head|embed_tokens|norm)\.weight", re.ASCII)


def checkpoint_tensors(model: str) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, a view of its file, of a checkpoint: directory or name."""
    from vllm.model_executor.model_loader.weight_utils import (
        checkpoint_dir,
        safetensors_files,
        safetensors_weights_iterator,
    )
    from vllm.transformers_utils.config import read_config_dict

    named = read_config_dict(model).get("transformers_weights")
    plan = safetensors_files(checkpoint_dir(model, None, None, ()), named=named)
    return safetensors_weights_iterator(plan)


class TargetTensors:
    """Of the checkpoint `model`, each in fp32 and read when it is first asked for;
    `VLLMValidationError` for one that the checkpoint does not have."""

    def __init__(self, model: str) -> None:
        self._model = model

    @cached_property
    def _found(self) -> dict[str, Tensor]:
        matched = ((_SHARED.fullmatch(name), t) for name, t in checkpoint_tensors(self._model))
        return {match[1]: tensor for match, tensor in matched if match is not None}

    @cached_property
    def embedding(self) -> Tensor:
        """`[vocab, hidden]`."""
        return self._read("embed_tokens")

    @cached_property
    def output_head(self) -> Tensor:
        """`[vocab, hidden]`; the embedding in a checkpoint where it is tied to that."""
        return self._read("lm_head") if "lm_head" in self._found else self.embedding

    @cached_property
    def final_norm(self) -> Tensor:
        """`[hidden]`, as it is stored."""
        return self._read("norm")

    def _read(self, name: str) -> Tensor:
        tensor = self._found.get(name)
        if tensor is None or not tensor.is_floating_point():
            raise VLLMValidationError(
                f"--model {self._model} has no {name}.weight that can be read as it is, which the "
                "drafter shares",
                "model",
            )
        return tensor.float()
