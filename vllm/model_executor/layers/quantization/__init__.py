# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: docs/quantization.md."""

from vllm.model_executor.layers.quantization.base import LinearMethod, QuantizationConfig

__all__ = ["LinearMethod", "QuantizationConfig"]
