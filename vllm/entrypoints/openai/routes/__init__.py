# SPDX-License-Identifier: Apache-2.0
"""Routers, one module per route group."""
