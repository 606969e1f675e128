# SPDX-License-Identifier: Apache-2.0
"""Turning conversations into prompts."""
