# SPDX-License-Identifier: Apache-2.0
"""State that changes while a process runs."""

phase = 0
