# SPDX-License-Identifier: Apache-2.0
"""How structured outputs are compiled."""

from typing import Literal

from vllm.utils.options import config, option


@config
class StructuredOutputsConfig:
    """Server-wide settings of structured outputs."""

    backend: Literal["auto", "xgrammar"] = option(
        default="auto", help="The grammar compiler; there is one."
    )
    disable_any_whitespace: bool = option(
        default=False,
        help="JSON without free whitespace: one space after colons and commas, none elsewhere.",
    )
