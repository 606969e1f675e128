# SPDX-License-Identifier: Apache-2.0
"""A worker in an actor, without Ray: its environment and its connection."""

from __future__ import annotations

import os
import pickle
import socket
import time

import numpy as np
import pytest

from vllm.distributed.rendezvous import listen
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor.message_socket import MessageSocket
from vllm.v1.executor.ray_address import await_cluster
from vllm.v1.executor.ray_worker import RayWorker, _Answers, _Messages, carried
from vllm.v1.executor.remote_workers import RemoteWorkers
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.executor.worker_process import Inbox, Kind
from vllm.v1.structured_output.mask_words import FilledMasks


def test_the_environment_that_workers_need() -> None:
    environment = {
        "VLLM_SANITIZE": "1",
        "HF_TOKEN": "t",
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "0",
    }
    others = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "VLLM_API_KEY": "k", "VLLM_HOST_IP": "a"}
    assert carried({**environment, **others}) == environment


def test_an_actor_takes_the_environment_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "1")
    RayWorker({"VLLM_PORT": "2"})
    assert os.environ["VLLM_PORT"] == "2"


def test_a_cluster_that_is_not_there_is_named() -> None:
    """Ray itself would look for it without end."""
    for address in ("", "auto", "local"):
        await_cluster(address, 0.0)
    with pytest.raises(TimeoutError, match="RAY_ADDRESS=127.0.0.1:1 does not answer in 0.1 s"):
        await_cluster("127.0.0.1:1", 0.1)
    with pytest.raises(VLLMValidationError, match="Ray Client.*HOST:PORT"):
        await_cluster("ray://127.0.0.1:10001", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as head:
        await_cluster(f"127.0.0.1:{head.getsockname()[1]}", 10.0)


def test_messages_and_answers_cross_one_connection() -> None:
    listener = listen("127.0.0.1", 0)
    theirs = MessageSocket(socket.create_connection(listener.getsockname()))
    workers = RemoteWorkers(MessageSocket(listener.accept()[0], "h"), range(3, 4), "the actor")
    listener.close()
    inbox, answers = Inbox(_Messages(theirs)), _Answers(theirs, 3)
    for kind, content in ((Kind.STEP, "one"), (Kind.STEP, "two")):
        workers.send(pickle.dumps((kind, content)), lambda: None)
    masks = FilledMasks(np.ones((3, 2), dtype=np.int32), [1, 2])
    workers.send(pickle.dumps((Kind.MASKS, masks)), lambda: None)
    assert inbox.next_work() == (Kind.STEP, "one")
    received = inbox.receive_masks()
    assert (received.words == masks.words).all() and received.counts == masks.counts
    answers.send_bytes(b"answer")
    (source,) = workers.sources
    assert list(workers.take(source)) == [(3, b"answer")]
    workers.begin_end("a reason")
    assert inbox.next_work() == (Kind.STEP, "two")
    assert inbox.next_work() == (Kind.STOP, None)
    answers.close()
    workers.finish_end(time.monotonic() + 60)
    with pytest.raises(WorkerDiedError, match="the actor is gone: connection closed"):
        list(workers.take(source))
    workers.close()
