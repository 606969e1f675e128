# SPDX-License-Identifier: Apache-2.0
"""A request's way through two engines: the first computes its prompt, the second answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx

from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")


#: looks in a row that a server fails before requests leave it that it has not begun to answer
_LOOKS = 2


@dataclass(eq=False)
class Instance:
    """A server. `running`: requests of this proxy that it works on. `hangs`: set while it fails
    one look after the other."""

    url: str
    healthy: bool = False
    running: int = 0
    turn: int = 0
    failed_looks: int = 0
    hangs: asyncio.Event = field(default_factory=asyncio.Event)

    async def unless_it_hangs(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the server hangs; then `ServerHangs`."""
        working = asyncio.ensure_future(work)
        hanging = asyncio.ensure_future(self.hangs.wait())
        try:
            await asyncio.wait({working, hanging}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hanging.cancel()
            working.cancel()  # if it has not ended
            await asyncio.wait({working})
        if working.cancelled():
            raise ServerHangs(f"{self.url} failed {self.failed_looks} looks at its /health")
        return working.result()


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
            problem = None if reply.is_success else f"health {reply.status_code}"
        except httpx.HTTPError as error:
            problem = repr(error)
        self.report(instance, problem)
        instance.failed_looks = 0 if problem is None else instance.failed_looks + 1
        if instance.failed_looks >= _LOOKS:
            instance.hangs.set()
        else:
            instance.hangs.clear()


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


#: what a server for answers says of a request that it will not take
_REFUSALS = (400, 422)
_NO_DECODE = "no decode server can be reached"


class NobodyThere(Exception):
    """No server of a kind that is needed can be reached."""


class AnswerBroken(Exception):
    """A server has not sent all of an answer of which the client has a part."""


class ServerHangs(Exception):
    """A server does not answer, and is not well."""


class Answer:
    """A second engine's reply, whose body has begun; `close` it in the end. `held`: what it needs
    until then; `report`: takes what has broken it."""

    def __init__(self, reply: httpx.Response, report: Callable[[str], None]) -> None:
        self._url, self._report = str(reply.url), report
        self.status = reply.status_code
        self.headers = reply.headers
        self.held = AsyncExitStack()
        self._chunks = reply.aiter_raw()
        self._first = b""

    async def begin(self) -> None:
        """Wait for the body's first bytes."""
        self._first = await anext(self._chunks, b"")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; `AnswerBroken` where it does not end."""
        yield self._first
        try:
            async for chunk in self._chunks:
                yield chunk
        except httpx.HTTPError as error:
            self._report(repr(error))
            raise AnswerBroken(f"{self._url} has not sent all of an answer: {error!r}") from None

    async def close(self) -> None:
        """The server learns that nobody listens, if it is not done."""
        await self.held.aclose()


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
        """The second engine's reply, or the first one's where the request is wrong for that. Raises
        `NobodyThere`."""
        if self._decode.next() is None:  # nobody would fetch the prompt's state
            raise NobodyThere(_NO_DECODE)
        if not needs_one_engine(body):
            state = await self._prompt_unless_refused(path, body, headers)
            if isinstance(state, httpx.Response):
                return state
            if state is not None:
                body = {**body, "kv_transfer_params": state}
        return await self._decode_with(path, body, headers)

    async def _prompt_unless_refused(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> Body | httpx.Response | None:
        """As `_compute_prompt`, which is called off when the second engine refuses the request: the
        first one does not see all of it."""
        computing = asyncio.ensure_future(self._compute_prompt(path, body, headers))
        checking = asyncio.ensure_future(self._refusal(path, body, headers))
        try:
            await asyncio.wait({computing, checking}, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done() and (refusal := checking.result()) is not None:
                return refusal
            return await computing
        finally:
            for one in (computing, checking):
                one.cancel()  # if it has not ended
            await asyncio.wait({computing, checking})

    async def _refusal(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> httpx.Response | None:
        """Why an engine would not answer, asked before there is a state; None where it would, or
        where that cannot be asked."""
        instance = self._decode.next()
        if instance is None:
            return None
        request = self._http.build_request(
            "POST", f"{instance.url}{path}/render", json=body, headers=headers
        )
        try:
            async with aclosing(await self._http.send(request, stream=True)) as reply:
                if reply.status_code in _REFUSALS:
                    await reply.aread()
                    return reply
        except httpx.HTTPError:  # noticed again, and reported, when it is to answer
            return None
        return None

    async def _compute_prompt(
        self, path: str, body: Body, headers: Mapping[str, str]
    ) -> Body | httpx.Response | None:
        """What the second engine has to be told; None: it computes the prompt itself."""
        tried: list[Instance] = []
        while (instance := self._prefill.next(tried)) is not None:
            tried.append(instance)
            with self._prefill.working(instance):
                post = self._http.post(
                    instance.url + path,
                    json=prompt_body(body),
                    headers=headers,
                    timeout=self._prefill_timeout,
                )
                try:
                    reply = await instance.unless_it_hangs(post)
                except (httpx.HTTPError, ServerHangs) as error:
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
            request = self._http.build_request(
                "POST", instance.url + path, json=body, headers=headers, timeout=_DECODE_TIMEOUT
            )
            async with AsyncExitStack() as held:
                try:
                    last = await instance.unless_it_hangs(self._begin(instance, request, held))
                except (httpx.HTTPError, ServerHangs) as error:
                    self._decode.report(instance, repr(error))
                    continue
                last.held = held.pop_all()
            if last.status < 500:
                return last
            logger.warning("%s answered %d: trying another", instance.url, last.status)
        if last is None:
            raise NobodyThere(_NO_DECODE)
        return last

    async def _begin(
        self, instance: Instance, request: httpx.Request, held: AsyncExitStack
    ) -> Answer:
        """An answer whose first bytes are there; `held` gets what has to be given up in the end."""
        held.enter_context(self._decode.working(instance))
        reply = await self._http.send(request, stream=True)
        held.push_async_callback(reply.aclose)
        answer = Answer(reply, partial(self._decode.report, instance))
        await answer.begin()
        return answer
