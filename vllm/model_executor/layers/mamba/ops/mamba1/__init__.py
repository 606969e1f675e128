# SPDX-License-Identifier: Apache-2.0
"""Mamba's selective scan, with a decay per element of the state and groups of heads."""
