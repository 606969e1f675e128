# SPDX-License-Identifier: Apache-2.0
"""Routes of other servers that clients may try: a 501 that says what to use instead."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.errors import APIError

_GENERATE = "use /v1/chat/completions or /v1/completions"
_STATELESS = "nothing is stored; send the whole conversation as `input` of /v1/responses"
_POOLING = "only text generation is served, on /v1/chat/completions and /v1/completions"
_ONLY_TEXT = "only text is served, on /v1/chat/completions and /v1/completions"
_FILE = "no files are kept; give one to `vllm run-batch`"
_CLIENT = "keep it in the client, and send what the model is to read with each request"
_LORA = "merge the adapter into the checkpoint and serve that"
_PROFILE = "use /metrics, or a profiler attached to the processes"
_NO_CACHE = "only text is served, there is no such cache; see /reset_prefix_cache"
_PAUSE = (
    "use /sleep?mode=wait and /wake_up, of servers with VLLM_SERVER_DEV_MODE=1 and "
    "--enable-sleep-mode, or /abort_requests"
)

#: path -> what to do instead
UNSUPPORTED = {
    "/v1/chat/completions/batch": "send one request per conversation, which the engine batches, "
    "or a file to `vllm run-batch`",
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/is_paused": _PAUSE,
    "/v1/responses/compact": "shorten `input` in the client",
    "/v1/responses/{response_id}": _STATELESS,
    "/v1/responses/{response_id}/cancel": "close the connection, or use /abort_requests",
    "/v1/responses/{response_id}/input_items": _STATELESS,
    "/v1/conversations": _STATELESS,
    "/v1/conversations/{conversation_id}": _STATELESS,
    "/v1/chat/completions/{completion_id}": "nothing is stored; keep the reply in the client",
    "/v1/assistants": _CLIENT,
    "/v1/threads": _CLIENT,
    "/v1/vector_stores": _CLIENT,
    "/v1/containers": _CLIENT,
    "/v1/files": _FILE,
    "/v1/files/{file_id}": _FILE,
    "/v1/uploads": _FILE,
    "/v1/batches": _FILE,
    "/v1/batches/{batch_id}": _FILE,
    "/v1/evals": "evaluate with a client, such as lm-eval",
    "/v1/fine_tuning/jobs": "train elsewhere and serve the checkpoint",
    "/v1/moderations": "check texts in the client",
    "/v1/images/generations": _ONLY_TEXT,
    "/v1/images/edits": _ONLY_TEXT,
    "/v1/images/variations": _ONLY_TEXT,
    "/v1/videos": _ONLY_TEXT,
    "/v1/messages/batches": "send the requests to /v1/messages, they are batched as they come",
    "/v1/embeddings": _POOLING,
    "/v2/embed": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/rerank": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/generative_scoring": "use /v1/completions with echo, logprobs and max_tokens 0",
    "/invocations": _GENERATE,
    "/v1/audio/transcriptions": _ONLY_TEXT,
    "/v1/audio/translations": _ONLY_TEXT,
    "/v1/audio/speech": _ONLY_TEXT,
    "/v1/realtime": "stream /v1/chat/completions instead",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/reset_mm_cache": _NO_CACHE,
    "/reset_encoder_cache": _NO_CACHE,
}


def _refusal(path: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        message = f"{path} is not supported by this server; {instead}"
        raise APIError(HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError", message)

    return refuse


def refusing_router(paths: dict[str, str]) -> APIRouter:
    """A router that refuses each path with what to do instead."""
    refusing = APIRouter()
    for path, instead in paths.items():
        refusing.add_api_route(
            path,
            _refusal(path, instead),
            methods=["GET", "POST", "DELETE"],
            include_in_schema=False,
        )
    return refusing


router = refusing_router(UNSUPPORTED)
#: in place of the route that --enable-tokenizer-info-endpoint mounts
no_tokenizer_info = refusing_router(
    {"/tokenizer_info": "start it with --enable-tokenizer-info-endpoint"}
)
