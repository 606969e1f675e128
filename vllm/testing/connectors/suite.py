# SPDX-License-Identifier: Apache-2.0
"""The checks as tests of the connector that the command line names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from vllm.testing.connectors import CHECKS, LAYOUTS, ConnectorCase, check_random_lives


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("check", CHECKS)
def test_connector(
    check: str,
    kind: str,
    connector_case: ConnectorCase,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    if kind not in connector_case.kinds:
        pytest.skip(f"the connector does not serve {kind} models")
    run = CHECKS[check]
    if run is check_random_lives:
        run = partial(check_random_lives, runs=pytestconfig.getoption("--kv-connector-runs"))
    run(connector_case, kind, tmp_path)
