# SPDX-License-Identifier: Apache-2.0
"""Placements of a supernet: which of its token mixers each layer uses.

A placement is a list with a name for every layer, or a short form of one: `all-X`; `everyNth-X` (X
in layers N - 1, 2N - 1, ..., attention elsewhere); `bookend-attn-X` (attention in the first two and
the last two layers, X between); or names joined by commas.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

NO_SUPERNET = "the model is no supernet: each of its layers has one mixer"

_ALIASES = {"swa": "sliding_window", "attn": "attention"}
_ALL, _BOOKEND = "all-", "bookend-attn-"
_EVERY = re.compile(r"every(\d{1,9})(?:st|nd|rd|th)-(.+)")

#: what is shown of a name that may be of any length
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80

Placement = Sequence[str] | str


def expand(placement: Placement, num_layers: int) -> list[str]:
    """The name of each layer's mixer, whatever form the placement has.

    `VLLMValidationError` for a list of another length than `num_layers`, or of other things.
    """
    check_form(placement)
    names = _expanded(placement, num_layers) if isinstance(placement, str) else placement
    if len(names) != num_layers:
        raise placement_error(
            f"it names {len(names)} layers, but the model has {num_layers}; give a name for each, "
            "or all-X, everyNth-X, bookend-attn-X"
        )
    return list(names)


def check_form(placement: object) -> None:
    """`VLLMValidationError` unless it is a list of names, or text."""
    names = [placement] if isinstance(placement, str) else placement
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        shown = _SHOWN.repr(placement)
        raise placement_error(f"expected a list of names, or a string, got {shown}")


def is_short_form(text: str) -> bool:
    """Whether it is `all-X`, `everyNth-X` or `bookend-attn-X`."""
    return text.startswith((_ALL, _BOOKEND)) or _EVERY.fullmatch(text) is not None


def as_text(placement: Placement) -> str:
    """The same placement, names joined by commas."""
    return placement if isinstance(placement, str) else ",".join(placement)


def _expanded(text: str, num_layers: int) -> list[str]:
    every = _EVERY.fullmatch(text)
    if every is not None and int(every[1]) > 0:
        step, name = int(every[1]), _full(every[2])
        return _beside_attention(text, name, range(step - 1, num_layers, step), num_layers)
    if text.startswith(_ALL):
        return [_full(text.removeprefix(_ALL))] * num_layers
    if text.startswith(_BOOKEND):
        name = _full(text.removeprefix(_BOOKEND))
        return _beside_attention(text, name, range(2, num_layers - 2), num_layers)
    return [_full(part.strip()) for part in text.split(",")]


def _beside_attention(text: str, name: str, layers: range, num_layers: int) -> list[str]:
    """`name` in `layers`, of which there must be some: nothing else would tell a wrong name."""
    if not layers:
        raise placement_error(
            f"{_SHOWN.repr(text)} has {_SHOWN.repr(name)} in none of {num_layers} layers; use "
            "all-attention"
        )
    return [name if i in layers else "attention" for i in range(num_layers)]


def _full(name: str) -> str:
    return _ALIASES.get(name, name)


def check_names(names: Sequence[str], choices: Mapping[int, Sequence[str]]) -> None:
    """`VLLMValidationError` unless each layer of `choices` has a mixer of that name."""
    for layer, known in choices.items():
        if names[layer] not in known:
            raise placement_error(
                f"layer {layer} has no mixer {_SHOWN.repr(names[layer])}; it has {', '.join(known)}"
            )


def why_one_at_a_time(vllm_config: VllmConfig) -> str | None:
    """Why all requests of this engine run with the same placement; None if each may choose."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages share the layers (--pipeline-parallel-size)"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector knows the layers' memory by its addresses"
    if vllm_config.speculative_config is not None:
        return "drafts follow the steps of one placement (--speculative-config)"
    if vllm_config.kv_events_config is not None:
        return "events do not say which placement a block belongs to (--kv-events-config)"
    if vllm_config.scheduler_config.scheduler_cls is not None:
        return "--scheduler-cls brings a scheduler that does not know placements"
    return None


def placement_error(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"placement: {message}", parameter="placement")
