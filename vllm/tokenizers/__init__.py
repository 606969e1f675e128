# SPDX-License-Identifier: Apache-2.0
"""Tokenizers."""

from vllm.transformers_utils.tokenizer import AnyTokenizer, get_tokenizer

__all__ = ["AnyTokenizer", "get_tokenizer"]
