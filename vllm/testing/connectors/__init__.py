# SPDX-License-Identifier: Apache-2.0
"""Tests for any connector class, as a pytest plugin:

    pytest -p vllm.testing.connectors --pyargs vllm.testing.connectors.suite \\
        --kv-connector '{"kv_connector": "MyConnector", "kv_connector_module_path": "my.module",
            "kv_connector_extra_config": {"path": "{storage}"}}'

A test module of one's own may define the fixture `connector_case` instead (a `ConnectorCase`) and
run `CHECKS` itself.
"""

from __future__ import annotations

import json

import pytest

from vllm.testing.connectors.case import (
    DAMAGES,
    VIOLATIONS,
    ConnectorCase,
    ContractViolation,
    damage_files,
)
from vllm.testing.connectors.checks import CHECKS, check_random_lives
from vllm.testing.connectors.layouts import LAYOUTS

__all__ = [
    "CHECKS",
    "DAMAGES",
    "LAYOUTS",
    "VIOLATIONS",
    "ConnectorCase",
    "ContractViolation",
    "check_random_lives",
    "damage_files",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("KV connectors")
    group.addoption(
        "--kv-connector",
        metavar="JSON",
        help="kv_transfer_config of the connector to test; {storage} becomes a directory.",
    )
    group.addoption(
        "--kv-connector-kinds",
        default="attention,window,hybrid",
        metavar="KINDS",
        help=f"Kinds of models it serves, among {', '.join(LAYOUTS)}.",
    )
    group.addoption(
        "--kv-connector-stores-only",
        action="store_true",
        help="It brings no prompts back.",
    )
    group.addoption(
        "--kv-connector-workers",
        type=int,
        default=1,
        metavar="N",
        help="Tensor-parallel ranks, each with a worker side of its own.",
    )
    group.addoption(
        "--kv-connector-runs",
        type=int,
        default=20,
        metavar="N",
        help="Random lives per kind of model.",
    )


@pytest.fixture
def connector_case(request: pytest.FixtureRequest) -> ConnectorCase:
    """What `--kv-connector` says."""
    given = request.config.getoption("--kv-connector")
    if given is None:
        pytest.fail("name a connector: --kv-connector '{\"kv_connector\": ...}'", pytrace=False)
    try:
        config = json.loads(given)
    except json.JSONDecodeError as error:
        pytest.fail(f"--kv-connector is no JSON: {error}", pytrace=False)
    try:
        return ConnectorCase(
            config,
            kinds=tuple(request.config.getoption("--kv-connector-kinds").split(",")),
            loads=not request.config.getoption("--kv-connector-stores-only"),
            num_workers=request.config.getoption("--kv-connector-workers"),
        )
    except ValueError as error:
        pytest.fail(f"what --kv-connector and its options say: {error}", pytrace=False)
