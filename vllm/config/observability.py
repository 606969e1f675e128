# SPDX-License-Identifier: Apache-2.0
"""What the engine reports about itself."""

from vllm.utils.options import config, option


@config
class ObservabilityConfig:
    """Logs and metrics."""

    disable_log_stats: bool = option(
        default=False, help="Do not log throughput and do not collect metrics."
    )
