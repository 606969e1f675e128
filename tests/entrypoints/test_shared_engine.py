# SPDX-License-Identifier: Apache-2.0
"""`LLM` in several threads, and in a forked child."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.entrypoints.test_llm_unit import make_llm, model, prompt_of, tokens_of
from tests.v1.engine.fakes import FakeExecutor, expected_tokens
from vllm import SamplingParams
from vllm.entrypoints.shared_engine import Turn
from vllm.exceptions import VLLMValidationError

__all__ = ["make_llm", "model"]

#: seconds after which a test is stuck
STUCK_S = 60


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts raise, also where the tests run in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["in-process", "own process"])
def make(request, make_llm, monkeypatch, forking):
    """Makes an `LLM` whose steps take `step_s`."""
    monkeypatch.setattr(FakeExecutor, "sleep", lambda *_: 1, raising=False)
    monkeypatch.setattr(FakeExecutor, "wake_up", lambda *_: None, raising=False)
    if request.param == "own process":
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    made = []

    def make(step_s):
        made.append(make_llm(enable_sleep_mode=True, additional_config={"step_s": step_s}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def llm(make):
    return make(0.001)


def in_threads(work, count):
    """Run `work(i)` in `count` threads; their results."""
    pool = ThreadPoolExecutor(count)
    try:
        return [future.result(STUCK_S) for future in [pool.submit(work, i) for i in range(count)]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def test_threads_generate_together(llm):
    """Each gets its own results, in order, bad requests and cancelled ones beside them."""

    def work(thread):
        rng = random.Random(thread)
        for _ in range(4):
            prompts = [prompt_of(rng.random(), rng.randint(1, 40)) for _ in range(5)]
            params = [
                SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True) for _ in "12345"
            ]
            with pytest.raises(VLLMValidationError):
                llm.generate([[1], [2], [10**6]], SamplingParams(max_tokens=50))
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert tokens_of(outputs) == [
                expected_tokens(p, s, 256) for p, s in zip(prompts, params, strict=True)
            ]
            llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2))
            llm.reset_prefix_cache()
            llm.collective_rpc("step_sizes")
        return True

    assert in_threads(work, 4) == [True] * 4
    assert not llm.llm_engine.has_unfinished_requests() and not llm._shared._places
    assert max(llm.collective_rpc("step_sizes")[0]) > 5  # requests of several threads in one step


def test_sleep_ends_the_requests_of_other_threads(make):
    llm = make(0.1)  # twenty seconds for what is to be ended

    def generate(i):
        return llm.generate([prompt_of(i, 9)] * 2, SamplingParams(max_tokens=200, ignore_eos=True))

    def sleep_soon():
        while llm.llm_engine.get_num_unfinished_requests() < 4:
            time.sleep(0.001)
        llm.sleep()

    sleeper = threading.Thread(target=sleep_soon, daemon=True)
    sleeper.start()
    results = in_threads(generate, 2)
    sleeper.join(STUCK_S)
    assert llm.is_sleeping()
    assert {o.outputs[0].finish_reason for outputs in results for o in outputs} == {"abort"}


def until_asked(turn, count):
    """Wait until so many wait for their turns."""
    deadline = time.monotonic() + STUCK_S
    while len(turn._queue) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_turns_go_round():
    turn = Turn(lambda: None)
    order = []

    def work(name):
        for _ in range(20):
            with turn:
                order.append(name)
                # The others ask for their next turns, of which the last round has none.
                until_asked(turn, min(2, 60 - len(order)))

    with turn:
        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        until_asked(turn, 3)
    for thread in threads:
        thread.join(STUCK_S)
    assert len(order) == 60
    assert all(sorted(order[i : i + 3]) == ["a", "b", "c"] for i in range(0, 60, 3))


def test_an_interrupted_wait_gives_its_turn_back(interruptible):
    turn = Turn(lambda: None)
    holds, let_go = threading.Event(), threading.Event()

    def hold():
        with turn:
            holds.set()
            let_go.wait(STUCK_S)

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(STUCK_S)
    main = threading.main_thread().ident

    def interrupt():
        until_asked(turn, 1)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), turn:
        pass
    let_go.set()
    holder.join(STUCK_S)
    with turn:
        pass


class InterruptedQueue(deque):
    """An interrupt is noticed when a call returns."""

    def append(self, ticket):
        super().append(ticket)
        raise KeyboardInterrupt


def test_an_interrupt_while_asking_leaves_nobody_in_the_queue():
    turn = Turn(lambda: None)
    with turn:
        turn._queue = InterruptedQueue()
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
        assert not turn._queue
    assert not turn._held


def test_an_interrupt_before_asking_takes_no_turn_from_others(monkeypatch):
    turn = Turn(lambda: None)
    with turn:
        with monkeypatch.context() as patch:
            patch.setattr(turn, "_mutex", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                turn.__enter__()
        assert turn._held


class Interrupted:
    """A lock that an interrupt comes before, once."""

    def __init__(self):
        self._lock = threading.Lock()
        self._comes = True

    def __enter__(self):
        if self._comes:
            self._comes = False
            raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_a_forked_child_is_refused_and_leaves_the_engine_alone(llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = tokens_of(llm.generate([prompt_of(0, 9)], params, use_tqdm=False))
    client = llm.llm_engine.engine_core

    def child():
        for call in (
            lambda: llm.generate([prompt_of(0, 9)], params),
            lambda: llm.collective_rpc("step_sizes"),
            lambda: client.add_requests([None]),
            lambda: client.get_output(),
        ):
            with pytest.raises(RuntimeError, match="belongs to process"):
                call()
        llm.shutdown()
        client._finalizer()

    pid = os.fork()
    if pid == 0:
        signal.alarm(STUCK_S)
        try:
            child()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert tokens_of(llm.generate([prompt_of(0, 9)], params, use_tqdm=False)) == expected
