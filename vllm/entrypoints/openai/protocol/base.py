# SPDX-License-Identifier: Apache-2.0
"""Types shared by every request body."""

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

logger = init_logger(__name__)

_INT64_MAX = 2**63 - 1


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, got a boolean")
    return value


def _fits_64_bits(value: int) -> int:
    if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise ValueError("the integer does not fit 64 bits")
    return value


def _can_travel(value: dict[str, Any]) -> dict[str, Any]:
    """The engine runs in another process; what msgpack cannot carry is the client's error."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the object cannot be sent to the engine: {error}") from None
    return value


Integer = Annotated[int, BeforeValidator(_refuse_bool), AfterValidator(_fits_64_bits)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]
#: lists whose first mistake is told, however many there are
Integers = Annotated[list[Integer], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
#: free-form JSON, passed on untouched
JsonObject = Annotated[dict[str, Any], AfterValidator(_can_travel)]


def refuse(parameter: str, message: str) -> NoReturn:
    """Raise the 400 error that names `parameter`."""
    raise VLLMValidationError(message, parameter=parameter)


def renamed(error: VLLMValidationError, names: Mapping[str, str]) -> VLLMValidationError:
    """`error` naming the field that this route's clients know; `names`: those of other routes, or
    of the engine -> the client's."""
    name = error.parameter
    if name is None or name not in names:
        return error
    message = error.message
    if message.startswith((f"{name} ", f"{name}:")):
        message = names[name] + message.removeprefix(name)
    return VLLMValidationError(message, names[name], error.value)


class RequestModel(BaseModel):
    """A request body; unknown keys are ignored with a debug note."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _note_unknown_keys(self) -> "RequestModel":
        if self.model_extra:
            logger.debug("ignored unknown request keys: %s", ", ".join(sorted(self.model_extra)))
        return self


class ReplyModel(BaseModel):
    """A response body; keys without a value are sent as null."""

    model_config = ConfigDict(protected_namespaces=())


class StreamOptions(RequestModel):
    """What a stream reports about usage: once at its end, or on every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class PromptTokensDetails(ReplyModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    """How many tokens a drafter proposed that became output, and how many that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageInfo(ReplyModel):
    """Token counts of one reply."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
