# SPDX-License-Identifier: Apache-2.0
"""What generation returns."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.outputs import CompletionOutput, RequestOutput, join_kv_transfer_params


def completion(index: int, params: dict[str, Any] | None) -> CompletionOutput:
    return CompletionOutput(index, "", [], kv_transfer_params=params)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([None], None),
        ([{"a": [1]}], {"a": [1]}),
        ([None, None], None),
        ([{"a": 1}, {"a": 2}], {"a": [1, 2]}),
        ([None, {"a": 2, "b": 3}, {"a": 4}], {"a": [None, 2, 4], "b": [None, 3, None]}),
        ([], None),
    ],
)
def test_transfer_parameters_of_several_completions(given: list[Any], expected: Any) -> None:
    assert join_kv_transfer_params([completion(i, p) for i, p in enumerate(given)]) == expected


def test_merged_outputs_keep_the_parameters_of_all_completions() -> None:
    merged = RequestOutput("r", None, None, None, [completion(0, {"a": 1})], False)
    merged.add(RequestOutput("r", None, None, None, [completion(1, {"a": 2})], True), True)
    assert merged.kv_transfer_params == {"a": [1, 2]}
