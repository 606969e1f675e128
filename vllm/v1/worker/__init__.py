# SPDX-License-Identifier: Apache-2.0
"""Runs the model on one device."""
