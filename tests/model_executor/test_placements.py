# SPDX-License-Identifier: Apache-2.0
"""Short forms of placements, and what is none."""

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.placements import check_names, expand

FULL, WINDOW = "attention", "sliding_window"


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("all-gdn", ["gdn"] * 6),
        ("all-swa", [WINDOW] * 6),
        ("every2nd-kda", [FULL, "kda"] * 3),
        ("every4th-swa", [FULL, FULL, FULL, WINDOW, FULL, FULL]),
        ("bookend-attn-gdn", [FULL, FULL, "gdn", "gdn", FULL, FULL]),
        ("gdn,attn, kda,swa,attention,gdn", ["gdn", FULL, "kda", WINDOW, FULL, "gdn"]),
        (["gdn", "x", "y", "z", "u", "v"], ["gdn", "x", "y", "z", "u", "v"]),
    ],
)
def test_forms(placement, names):
    assert expand(placement, 6) == names


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (["gdn"] * 5, "it names 5 layers, but the model has 6"),
        ("gdn,kda", "it names 2 layers"),
        ("every0th-gdn", "it names 1 layers.*; give a name for each, or all-X"),
        (f"every{'9' * 5000}th-gdn", "it names 1 layers"),
        ("every7th-gdm", "'every7th-gdm' has 'gdm' in none of 6 layers; use all-attention"),
        ([1] * 6, "expected a list of names"),
        ({"0": "gdn"}, "expected a list of names"),
    ],
)
def test_what_is_none(placement, message):
    with pytest.raises(VLLMValidationError, match=message):
        expand(placement, 6)


def test_a_middle_that_is_not_there():
    with pytest.raises(VLLMValidationError, match="has 'gdn' in none of 4 layers"):
        expand("bookend-attn-gdn", 4)


def test_names_that_a_layer_has_not():
    choices = {0: ["gdn"], 2: ["kda", "gdn"]}
    check_names(["gdn", "whatever", "kda"], choices)
    with pytest.raises(VLLMValidationError, match="layer 2 has no mixer 'swa'; it has kda, gdn"):
        check_names(["gdn", "x", "swa"], choices)
