# SPDX-License-Identifier: Apache-2.0
"""Loading of tokenizers through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer = Any

#: mode -> whether the Rust implementation is wanted
_MODES = {"auto": True, "hf": True, "slow": False}


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local directory or a hub name; extra keywords go to transformers.

    Raises `VLLMValidationError` for an unknown mode or a tokenizer that cannot be loaded, for want
    of a package that its code imports (tiktoken for Kimi's) among others.
    """
    from transformers import AutoTokenizer

    if tokenizer_mode not in _MODES:
        raise VLLMValidationError(
            f"--tokenizer-mode {tokenizer_mode!r} is not supported; use one of {', '.join(_MODES)}",
            parameter="tokenizer_mode",
            value=tokenizer_mode,
        )
    kwargs.setdefault("use_fast", _MODES[tokenizer_mode])
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(tokenizer_name),
            *args,
            trust_remote_code=trust_remote_code,
            revision=revision,
            cache_dir=download_dir,
            **kwargs,
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise _no_tokenizer(tokenizer_name, reason) from error
    if not tokenizer.encode("a", add_special_tokens=False):
        # transformers makes an empty tokenizer of the model's class where the files are missing
        raise _no_tokenizer(tokenizer_name, "its files are missing or hold no vocabulary")
    return tokenizer


def _no_tokenizer(name: str | Path, reason: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"no tokenizer can be loaded from {str(name)!r}: {reason}; give one with --tokenizer, or "
        "use --skip-tokenizer-init and send token ids",
        parameter="tokenizer",
        value=str(name),
    )
