# SPDX-License-Identifier: Apache-2.0
"""Parameters of pooling (embedding, classification) requests."""

import msgspec


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Importable for clients that only name the type.

    Only generation models are served, so making one raises.
    """

    def __post_init__(self) -> None:
        raise NotImplementedError(
            "pooling models are not supported; use SamplingParams with a generation model"
        )
