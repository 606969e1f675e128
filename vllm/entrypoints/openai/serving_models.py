# SPDX-License-Identifier: Apache-2.0
"""The served names and `/v1/models`."""

import reprlib
import time
import uuid
from collections.abc import Collection
from typing import Literal

from vllm.entrypoints.openai.errors import ModelNotFoundError
from vllm.entrypoints.openai.protocol.base import ReplyModel
from vllm.exceptions import VLLMValidationError


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


class ServingModels:
    """Knows which names stand for the one loaded model; the first one is shown in replies.

    `aliases`: of a supernet, names that stand for the model with a placement.
    """

    def __init__(
        self,
        names: list[str],
        model_path: str,
        max_model_len: int,
        aliases: Collection[str] = (),
    ) -> None:
        self.names = [*names, *aliases]
        self.aliases = frozenset(aliases)
        self.model_path = model_path
        self.max_model_len = max_model_len
        self._created = int(time.time())
        self._permission_id = f"modelperm-{uuid.uuid4().hex}"

    @property
    def shown_name(self) -> str:
        return self.names[0]

    def check(self, name: str | None) -> str:
        """The name for the reply; raises `ModelNotFoundError`, a missing name is the first."""
        if not name:
            return self.shown_name
        if name not in self.names:
            raise ModelNotFoundError(name)
        return name

    def placement(self, name: str | None, asked: str | list[str] | None) -> str | list[str] | None:
        """The placement of a request for the model `name` that asked for one itself, or for none;
        `VLLMValidationError` if both say something else."""
        if name not in self.aliases:
            return asked
        if asked not in (None, name):
            raise VLLMValidationError(
                f"the model {name!r} is a placement, and the request asks for "
                f"{reprlib.repr(asked)}; leave one of them out",
                "placement",
            )
        return name

    def card(self, name: str) -> ModelCard:
        """Description of one served name; raises `ModelNotFoundError`."""
        return ModelCard(
            id=self.check(name),
            created=self._created,
            root=self.model_path,
            parent=self.shown_name if name in self.aliases else None,
            max_model_len=self.max_model_len,
            permission=[ModelPermission(id=self._permission_id, created=self._created)],
        )

    def list(self) -> ModelList:
        """Every served name."""
        return ModelList(data=[self.card(name) for name in self.names])
