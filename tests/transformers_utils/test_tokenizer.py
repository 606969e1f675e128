# SPDX-License-Identifier: Apache-2.0
"""Loading of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, dynamic_module_utils

from vllm import tokenizers as public
from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.tokenizer import get_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> str:
    vocab = {char: index for index, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("mode", ["auto", "hf"])
def test_round_trip(saved: str, mode: str) -> None:
    tokenizer = get_tokenizer(saved, tokenizer_mode=mode, trust_remote_code=False, revision=None)
    ids = tokenizer.encode("abc")
    assert len(ids) == 3
    assert public.get_tokenizer is get_tokenizer


def test_unknown_mode(saved: str) -> None:
    with pytest.raises(VLLMValidationError, match="'mistral'.*auto, hf, slow"):
        get_tokenizer(saved, tokenizer_mode="mistral")


def test_a_package_that_its_code_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "tokenization_own.py").write_text("import no_such_package\nclass Own: ...\n")
    auto_map = {"AutoTokenizer": ["tokenization_own.Own", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(VLLMValidationError, match="no_such_package.*--skip-tokenizer-init"):
        get_tokenizer(tmp_path, trust_remote_code=True)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match="--skip-tokenizer-init"):
        get_tokenizer(tmp_path)
