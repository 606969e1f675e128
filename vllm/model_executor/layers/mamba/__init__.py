# SPDX-License-Identifier: Apache-2.0
"""Convolution and state-space operations."""
