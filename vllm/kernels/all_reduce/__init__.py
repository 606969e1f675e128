# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks, alone and with the residual stream's addition and norm."""
