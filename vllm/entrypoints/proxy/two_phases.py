# SPDX-License-Identifier: Apache-2.0
"""A request's way through two engines: the first computes its prompt, the second answers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(eq=False)
class Instance:
    """A server. `running`: requests of this proxy that it works on."""

    url: str
    healthy: bool = False
    running: int = 0
    turn: int = 0


class Instances:
    """Servers of one kind. The one with the fewest requests is next; among equals the one that had
    its turn longest ago."""

    def __init__(self, kind: str, urls: Iterable[str]) -> None:
        self.kind = kind
        self.all = [Instance(url.rstrip("/")) for url in urls]
        self._turns = 0

    def next(self, tried: Iterable[Instance] = ()) -> Instance | None:
        """A healthy server that was not tried; None if there is none."""
        left = [one for one in self.all if one.healthy and one not in set(tried)]
        return min(left, key=lambda one: (one.running, one.turn), default=None)

    @contextmanager
    def working(self, instance: Instance) -> Iterator[None]:
        """Counts a request while it runs."""
        self._turns += 1
        instance.turn = self._turns
        instance.running += 1
        try:
            yield
        finally:
            instance.running -= 1

    def report(self, instance: Instance, problem: str | None) -> None:
        """What the last contact with a server showed; None: it is well."""
        healthy = problem is None
        if healthy != instance.healthy:
            what = "answers" if healthy else f"is left out: {problem}"
            logger.info("%s server %s %s", self.kind, instance.url, what)
        instance.healthy = healthy

    async def look(self, http: httpx.AsyncClient, timeout_s: float) -> None:
        """Ask all servers how they are."""
        await asyncio.gather(*(self._look(one, http, timeout_s) for one in self.all))

    async def _look(self, instance: Instance, http: httpx.AsyncClient, timeout_s: float) -> None:
        try:
            reply = await http.get(f"{instance.url}/health", timeout=timeout_s)
            self.report(instance, None if reply.is_success else f"health {reply.status_code}")
        except httpx.HTTPError as error:
            self.report(instance, repr(error))


Body = dict[str, Any]

#: ask for several completions, of which each would need a state of its own
_SEVERAL = ("n", "best_of")
#: belong to the answer; the first engine's is dropped
_OF_THE_ANSWER = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "stop",
    "max_completion_tokens",
)
#: seconds to connect; an answer may take long
_DECODE_TIMEOUT = httpx.Timeout(10.0, read=None)


class NobodyThere(Exception):
    """No server of a kind that is needed can be reached."""


class Answer:
    """A second engine's reply, status and headers read; `close` it in the end."""

    def __init__(self, reply: httpx.Response, working: ExitStack) -> None:
        self.status = reply.status_code
        self.content_type = reply.headers.get("content-type", "application/json")
        self._reply = reply
        self._working = working

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        async for chunk in self._reply.aiter_raw():
            yield chunk

    async def close(self) -> None:
        """The server learns that nobody listens, if it is not done."""
        await self._reply.aclose()
        self._working.close()


def needs_one_engine(body: Body) -> bool:
    """Whether a request cannot use an engine for its prompt: it asks about the prompt itself, or
    for several completions, or says where its state is."""
    prompt = body.get("prompt")
    several_prompts = isinstance(prompt, list) and any(not isinstance(p, int) for p in prompt)
    return (
        several_prompts
        or any(body.get(key) not in (None, 1) for key in _SEVERAL)
        or body.get("prompt_logprobs") is not None
        or bool(body.get("echo"))
        or bool(body.get("use_beam_search"))
        or body.get("kv_transfer_params") is not None
    )


def prompt_body(body: Body) -> Body:
    """The request for the first engine."""
    kept = {key: value for key, value in body.items() if key not in _OF_THE_ANSWER}
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**kept, "stream": False, "max_tokens": 1, "kv_transfer_params": wanted}


class TwoPhases:
    """Sends requests on; an engine that fails is left out until it is well again."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        prefill: Instances,
        decode: Instances,
        prefill_timeout_s: float,
    ) -> None:
        self._http, self._prefill, self._decode = http, prefill, decode
        self._prefill_timeout = httpx.Timeout(10.0, read=prefill_timeout_s)

    async def answer(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> Answer | httpx.Response:
        """The second engine's reply, or the first one's where the request is wrong. Raises
        `NobodyThere`."""
        if not needs_one_engine(body):
            state = await self._compute_prompt(path, body, headers)
            if isinstance(state, httpx.Response):
                return state
            if state is not None:
                body = {**body, "kv_transfer_params": state}
        return await self._decode_with(path, body, headers)

    async def _compute_prompt(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> Body | httpx.Response | None:
        """What the second engine has to be told; None: it computes the prompt itself."""
        tried: list[Instance] = []
        while (instance := self._prefill.next(tried)) is not None:
            tried.append(instance)
            with self._prefill.working(instance):
                try:
                    reply = await self._http.post(
                        instance.url + path,
                        json=prompt_body(body),
                        headers=headers,
                        timeout=self._prefill_timeout,
                    )
                except httpx.HTTPError as error:
                    self._prefill.report(instance, repr(error))
                    continue
            if reply.is_success:
                state = reply.json().get("kv_transfer_params")
                return state if isinstance(state, dict) else None
            if reply.is_client_error:
                return reply
            logger.warning("%s answered %d: trying another", instance.url, reply.status_code)
        logger.warning("no prefill server can be reached: the prompt is computed where it is used")
        return None

    async def _decode_with(self, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        tried: list[Instance] = []
        last: Answer | None = None
        while (instance := self._decode.next(tried)) is not None:
            tried.append(instance)
            if last is not None:
                await last.close()
                last = None
            working = ExitStack()
            working.enter_context(self._decode.working(instance))
            try:
                request = self._http.build_request(
                    "POST", instance.url + path, json=body, headers=headers, timeout=_DECODE_TIMEOUT
                )
                last = Answer(await self._http.send(request, stream=True), working)
            except BaseException as error:
                working.close()
                if not isinstance(error, httpx.HTTPError):
                    raise
                self._decode.report(instance, repr(error))
                continue
            if last.status < 500:
                return last
            logger.warning("%s answered %d: trying another", instance.url, last.status)
        if last is None:
            raise NobodyThere("no decode server can be reached")
        return last
