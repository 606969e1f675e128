# SPDX-License-Identifier: Apache-2.0
"""Settings of attention, as one object."""

from vllm.utils.options import config, option


@config
class AttentionConfig:
    """The structured form of `--attention-backend`."""

    backend: str | None = option(default=None, help="See --attention-backend.")
