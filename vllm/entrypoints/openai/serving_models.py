# SPDX-License-Identifier: Apache-2.0
"""The served names and `/v1/models`."""

import time
import uuid

from vllm.entrypoints.openai.errors import ModelNotFoundError
from vllm.entrypoints.openai.protocol.models import ModelCard, ModelList, ModelPermission


class ServingModels:
    """Knows which names stand for the one loaded model; the first one is shown in replies."""

    def __init__(self, names: list[str], model_path: str, max_model_len: int) -> None:
        self.names = names
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

    def card(self, name: str) -> ModelCard:
        """Description of one served name; raises `ModelNotFoundError`."""
        return ModelCard(
            id=self.check(name),
            created=self._created,
            root=self.model_path,
            max_model_len=self.max_model_len,
            permission=[ModelPermission(id=self._permission_id, created=self._created)],
        )

    def list(self) -> ModelList:
        """Every served name."""
        return ModelList(data=[self.card(name) for name in self.names])
