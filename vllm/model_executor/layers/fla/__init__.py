# SPDX-License-Identifier: Apache-2.0
"""Linear attention (flash-linear-attention's layout of ops)."""
