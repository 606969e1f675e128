# SPDX-License-Identifier: Apache-2.0
"""Connectors: the interface, the registry and the ones that ship with the engine."""
