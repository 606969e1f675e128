# SPDX-License-Identifier: Apache-2.0
"""Settings of attention, as one object."""

from vllm.config.base import config, option


@config
class AttentionConfig:
    """The structured form of `--attention-backend`."""

    backend: str | None = option(default=None, help="See --attention-backend.")
