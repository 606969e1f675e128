# SPDX-License-Identifier: Apache-2.0
"""Methods that `LLM` has elsewhere and that cannot be served here, each with a clear refusal."""

from typing import Any, NoReturn


def _no_pooling(method: str) -> NoReturn:
    raise NotImplementedError(
        f"LLM.{method} needs a pooling model; only text generation is served: use generate, chat "
        "or beam_search (prompt_logprobs scores a given text)"
    )


class LLMRefusals:
    """Base of `LLM`. Every method raises `NotImplementedError`."""

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_pooling("encode")

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_pooling("embed")

    def classify(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_pooling("classify")

    def score(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_pooling("score")

    def reward(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_pooling("reward")

    def start_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("profiling is not supported; use an external profiler")

    def stop_profile(self) -> NoReturn:
        self.start_profile()
