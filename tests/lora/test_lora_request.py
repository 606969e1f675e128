# SPDX-License-Identifier: Apache-2.0
"""Adapters can be named but not used."""

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest, check_no_lora


def test_naming_one_is_fine() -> None:
    request = LoRARequest("name", 1, "/path")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("name", 1, "/path")
    with pytest.raises(ValueError, match="at least 1"):
        LoRARequest("name", 0, "/path")


def test_using_one_is_an_error() -> None:
    check_no_lora(None)
    with pytest.raises(VLLMValidationError, match="'name'.*merge the adapter"):
        check_no_lora(LoRARequest("name", 1, "/path"))
