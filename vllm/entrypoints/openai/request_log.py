# SPDX-License-Identifier: Apache-2.0
"""Optional log lines about requests (`--enable-log-requests`, `--enable-log-outputs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.entrypoints.openai.rendering import RenderedPrompt
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)


@dataclass(frozen=True)
class RequestLog:
    """`max_len` bounds the characters or token ids shown; None shows everything."""

    requests: bool = False
    outputs: bool = False
    max_len: int | None = None

    def received(self, request_id: str, prompt: RenderedPrompt, params: SamplingParams) -> None:
        """Log a request on its way to the engine."""
        if self.requests:
            text = None if prompt.text is None else prompt.text[: self.max_len]
            ids = prompt.token_ids[: self.max_len]
            logger.info("received %s: prompt %r, token ids %s, %s", request_id, text, ids, params)

    def aborted(self, request_id: str) -> None:
        """Log a request that nobody waits for any more."""
        if self.requests:
            logger.info("aborted %s: its client left or its time was over", request_id)

    def produced(self, request_id: str, output: RequestOutput) -> None:
        """Log what the engine returned."""
        if self.outputs:
            for completion in output.outputs:
                logger.info(
                    "output of %s[%d]: %r, token ids %s, finish reason %s",
                    request_id,
                    completion.index,
                    completion.text[: self.max_len],
                    list(completion.token_ids[: self.max_len]),
                    completion.finish_reason,
                )
