# SPDX-License-Identifier: Apache-2.0
"""Captures and replays on the CPU: what a graph would keep, and what no replay could follow."""
