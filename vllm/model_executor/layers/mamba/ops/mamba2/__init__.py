# SPDX-License-Identifier: Apache-2.0
"""Mamba2's state-space layer: a scalar decay per head, inputs and outputs shared by head groups."""
