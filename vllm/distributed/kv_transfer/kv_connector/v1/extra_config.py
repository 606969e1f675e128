# SPDX-License-Identifier: Apache-2.0
"""What a user may say in `kv_connector_extra_config`, and how the rest is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class ExtraConfig:
    """The settings that `owner` was given; every refusal names it, the setting and its value."""

    owner: str
    given: Mapping[str, Any]

    def refused(self, key: str, value: Any, instead: str) -> VLLMValidationError:
        """The error for a value that cannot be honoured; `instead`: what to give."""
        message = f"{self.owner}: {key} {value!r}: {instead}"
        return VLLMValidationError(message, parameter=key, value=value)

    def check_keys(self, known: Sequence[str], where: str = "kv_connector_extra_config") -> None:
        """Raises for a setting that is not `known`."""
        for key, value in self.given.items():
            if key not in known:
                raise self.refused(key, value, f"{where} knows {', '.join(known)}")

    def positive(
        self, key: str, default: float | None = None, what: str = "a positive number"
    ) -> float:
        """Raises for anything else, and without a default for nothing."""
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refused(key, value, f"give {what}")
        return value
