# SPDX-License-Identifier: Apache-2.0
"""`/tokenize` and `/detokenize`."""

from vllm.entrypoints.openai.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.rendering import PromptRenderer
from vllm.entrypoints.openai.serving_engine import RequestContext
from vllm.entrypoints.openai.serving_models import ServingModels
from vllm.exceptions import VLLMValidationError


class ServingTokenization:
    """Shows how a text or a conversation becomes token ids, and back."""

    def __init__(self, models: ServingModels, renderer: PromptRenderer) -> None:
        self.models = models
        self.renderer = renderer

    async def tokenize(self, request: TokenizeRequest, context: RequestContext) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        self.models.check(request.model)
        if (request.prompt is None) == (not request.messages):
            raise VLLMValidationError("give either prompt or messages", parameter="prompt")
        if request.prompt is not None:
            prompt = await self.renderer.completion_prompt(
                request.prompt, add_special_tokens=request.add_special_tokens is not False
            )
        else:
            prompt = await self.renderer.chat_prompt(request)
        tokenizer = self.renderer.require_tokenizer("prompt")
        ids = prompt.token_ids
        pieces = None
        if request.return_token_strs:
            pieces = list(await self.renderer.run(tokenizer.convert_ids_to_tokens, ids))
        return TokenizeResponse(
            count=len(ids),
            max_model_len=self.models.max_model_len,
            tokens=ids,
            token_strs=pieces,
        )

    async def detokenize(
        self, request: DetokenizeRequest, context: RequestContext
    ) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""
        self.models.check(request.model)
        return DetokenizeResponse(prompt=await self.renderer.decode(request.tokens, False))
