# SPDX-License-Identifier: Apache-2.0
"""A static check that a forward pass can be captured: see docs/graph-safety.md."""
