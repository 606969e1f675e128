# SPDX-License-Identifier: Apache-2.0
"""Turning logits into tokens."""
