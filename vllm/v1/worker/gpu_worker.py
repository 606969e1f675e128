# SPDX-License-Identifier: Apache-2.0
"""The import path out-of-tree code uses for the worker."""

from vllm.v1.worker.worker import Worker

__all__ = ["Worker"]
