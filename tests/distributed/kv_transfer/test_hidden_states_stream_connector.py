# SPDX-License-Identifier: Apache-2.0
"""`StreamHiddenStatesConnector` and `NixlHiddenStatesConnector`: trainers get what files hold."""

from __future__ import annotations

import importlib.util
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    Harness,
    cache_config,
    extraction_config,
    row_values,
    transfer_config,
)
from tests.distributed.kv_transfer.test_hidden_states_stream import ABOUT
from tests.distributed.kv_transfer.trainer_checks import (
    check_kit,
    check_same_as_files,
    check_slow_trainer,
    check_too_many_rows,
    run,
)
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.stream_hidden_states_connector import (
    StreamHiddenStatesConnector,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_storage import RowFormat
from vllm.hidden_states_stream import RemoteRows

pytestmark = pytest.mark.slow
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
)
CONNECTORS = [
    "StreamHiddenStatesConnector",
    pytest.param("NixlHiddenStatesConnector", marks=needs_nixl),
]


def address_of(harness: Harness) -> str:
    assert isinstance(harness.scheduler, StreamHiddenStatesConnector)
    return str(harness.scheduler._place()["hidden_states_stream"])


def configured(connector: str, **settings: Any) -> VllmConfig:
    return extraction_config(transfer_config(connector, **settings))


def harness_of(
    connector: str = "StreamHiddenStatesConnector", **options: Any
) -> tuple[Harness, str]:
    """With the address that replies name."""
    settings = {"host": "127.0.0.1", "port": 0, **options}
    harness = Harness(configured(connector, **settings), cache_config())
    told = harness.worker.get_handshake_metadata()
    assert told is not None
    harness.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
    return harness, address_of(harness)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("storage", ["auto", "fp8_e4m3"])
def test_rows_of_requests_arrive(connector: str, storage: str) -> None:
    harness, address = harness_of(connector, stream_bytes=2**16, storage_dtype=storage)
    with RemoteRows(address) as reader, RemoteRows(address, raw=True) as raw:
        assert reader.about == {**ABOUT, "storage": storage}
        sent = run(harness, "prompt", 40)
        sent |= run(harness, "all", 21, include_output_tokens=True)
        assert sent | harness.step() == {"prompt", "all"}
        rows = reader.get(60)
        assert rows is not None and rows.token_ids.tolist() == [*range(100, 140)]
        assert torch.allclose(rows.hidden_states, row_values(0, 40), rtol=1 / 16)
        assert torch.equal(rows.hidden_states, row_values(0, 40)) == (storage == "auto")
        rows = raw.get(60)
        assert rows is not None and rows.token_ids.tolist() == [*range(100, 121), 7]
        if storage == "auto":
            assert rows.scales is None and torch.equal(rows.hidden_states, row_values(1, 22))
        else:
            stored = RowFormat(COLUMNS, HIDDEN, torch.float32, "fp8_e4m3").store(row_values(1, 22))
            assert rows.hidden_states.dtype == torch.float8_e4m3fn and rows.scales is not None
            assert torch.equal(rows.hidden_states.float(), stored.hidden_states.float())
            assert stored.scales is not None and torch.equal(rows.scales, stored.scales)
        closing = threading.Thread(target=harness.worker.shutdown)
        closing.start()
        assert reader.get(60) is None and raw.get(60) is None
        closing.join()


def test_a_slow_trainer_makes_requests_keep_their_blocks() -> None:
    harness, address = harness_of(stream_bytes=4096)
    check_slow_trainer(harness, lambda: RemoteRows(address))


def test_rows_that_can_never_fit_fail_their_request() -> None:
    harness, _ = harness_of(stream_bytes=4096)
    check_too_many_rows(harness, "in a stream of 4096")


def test_each_replica_has_a_port_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = listener.getsockname()[1] - 2
    config = configured("StreamHiddenStatesConnector", host="127.0.0.1", port=first)
    config.parallel_config.data_parallel_rank = 2
    harness = Harness(config, cache_config())
    assert address_of(harness) == f"127.0.0.1:{first + 2}"
    RemoteRows(address_of(harness)).close()
    harness.worker.shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"port": -1}, "port -1: give a port"),
        ({"host": ""}, "host '': give an address that the trainers can reach"),
        ({"stream_bytes": 0}, "stream_bytes 0: give a positive number of bytes"),
        ({"when_full": "block"}, "when_full 'block': choose one of"),
        ({"lease_s": 0}, "lease_s 0: give a positive number"),
        ({"storage_dtype": "fp8"}, "storage_dtype 'fp8': choose one of"),
        ({"backends": ["UCX"]}, "backends .*: .* knows host, port"),
    ],
)
def test_settings_are_checked(extra: dict[str, Any], message: str) -> None:
    transfer = transfer_config("StreamHiddenStatesConnector", **extra)
    with pytest.raises(VLLMValidationError, match=message):
        Harness(extraction_config(transfer), cache_config())


OF_ENGINE = {"layer_ids": [0, 1, 2], "dtype": "float32", "storage": "auto"}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_an_engine_gives_a_trainer_what_it_gives_files(connector: str, tmp_path: Path) -> None:
    def open_reader(reply: dict[str, Any]) -> RemoteRows:
        return RemoteRows(reply["hidden_states_stream"], expect=OF_ENGINE)

    extra = {"host": "127.0.0.1", "port": 0, "stream_bytes": 2**20}
    check_same_as_files(connector, extra, open_reader, 60, tmp_path)


def test_passes_the_kit(tmp_path: Path) -> None:
    extra = {"host": "127.0.0.1", "port": 0, "stream_bytes": 100_000, "when_full": "drop_oldest"}
    check_kit("StreamHiddenStatesConnector", extra, tmp_path)
