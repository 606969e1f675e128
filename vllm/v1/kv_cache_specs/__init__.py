# SPDX-License-Identifier: Apache-2.0
"""Specs: what each kind of layer keeps between steps."""
