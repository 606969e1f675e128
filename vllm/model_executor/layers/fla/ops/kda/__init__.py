# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the delta rule with a decay for each key channel."""
