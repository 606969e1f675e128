# SPDX-License-Identifier: Apache-2.0
"""Router logits of 16-bit models have transformers' element type and, up to the order of sums, its
values: rounded to 16 bits they would choose other experts now and then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model_executor.harness import get_model, make_config
from tests.tiny_models import hf_model, tiny_model
from vllm.model_executor.layers.moe import mixtures_of

pytestmark = pytest.mark.parity
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "kimi_linear", "nemotron_h_moe", "mixtral"]
)
@torch.no_grad()
def test_logits_of_a_16_bit_model(family: str) -> None:
    path = tiny_model(family, BF16)
    router = mixtures_of(get_model(make_config(path, dtype=BF16)))[0].router
    theirs: nn.Module = next(
        module for name, module in hf_model(path, BF16).named_modules() if name.endswith(".gate")
    )
    x = torch.randn(40, router.weight.shape[1], dtype=BF16)
    expected = theirs(x[None])[0]
    found = router(x)[:, : expected.shape[-1]]
    torch.testing.assert_close(found, expected.view_as(found))
