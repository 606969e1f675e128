# SPDX-License-Identifier: Apache-2.0
"""These tests start without decision records and share tiny checkpoints."""

from tests.config.fixtures import fresh_decisions, hybrid, llama, mixture

__all__ = ["fresh_decisions", "hybrid", "llama", "mixture"]
