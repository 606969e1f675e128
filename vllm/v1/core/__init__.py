# SPDX-License-Identifier: Apache-2.0
"""Scheduling and state memory (host side, integers only)."""
