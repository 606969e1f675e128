# SPDX-License-Identifier: Apache-2.0
"""Reply of `/v1/models`."""

from typing import Literal

from vllm.entrypoints.openai.protocol.base import ReplyModel


class ModelPermission(ReplyModel):
    """What a client may do with a model, in the words of the OpenAI API."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(ReplyModel):
    """One served name; `root` is the model's path, `max_model_len` its context in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = []


class ModelList(ReplyModel):
    """Every served name."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = []
