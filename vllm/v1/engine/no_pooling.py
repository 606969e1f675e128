# SPDX-License-Identifier: Apache-2.0
"""What engines say to calls for pooling models."""

from collections.abc import Callable
from typing import Any, NoReturn


def no_pooling(method: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises `NotImplementedError`. `method`: with its class; `instead`: what there
    is."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{method} needs a pooling model; only text generation is served: use {instead} "
            "(prompt_logprobs scores a given text)"
        )

    return refuse
