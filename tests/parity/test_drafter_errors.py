# SPDX-License-Identifier: Apache-2.0
"""A layer of a drafter that fails while it runs is named, apart from the target's."""

from __future__ import annotations

import re

import pytest
import torch
from drafter_engines import Methods
from parity_checks import MakeEngine, in_this_process, prompts

from vllm import SamplingParams, TokensPrompt
from vllm.v1.spec_decode.model_drafter import ModelDrafter

pytestmark = [pytest.mark.parity, in_this_process]

MODULES = [
    ("mtp", "mtp.fc"),
    ("mtp", "mtp.layers.0.self_attn.o_proj"),
    ("eagle3", "eagle3.fc"),
    ("eagle3", "eagle3.layers.0.mlp.down_proj"),
    ("dflash", "dflash.fc"),
    ("dflash", "dflash.layers.1.self_attn.qkv_proj"),
    ("draft_model-itself", "draft.model.layers.0.mlp.down_proj"),
]


@pytest.mark.parametrize(("method", "name"), MODULES)
def test_a_failing_layer_is_named(
    make_engine: MakeEngine, methods: Methods, method: str, name: str
) -> None:
    drafting = methods(method)
    speculation = drafting.config | {"num_speculative_tokens": 3}
    llm = make_engine(
        "qwen3_5", model=str(drafting.target), speculative_config=speculation, max_num_seqs=2
    )
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    drafter = runner.drafter
    model = drafter.model if isinstance(drafter, ModelDrafter) else drafter.head
    module = model.get_submodule(name.partition(".")[2])
    module.weight.data = torch.zeros(module.weight.shape[0], 3)
    (prompt,) = prompts((5,))
    with pytest.raises(RuntimeError, match=f"^{re.escape(name)}: "):
        llm.generate(
            TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=9), use_tqdm=False
        )
