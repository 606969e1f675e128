# SPDX-License-Identifier: Apache-2.0
"""Config classes that transformers does not have."""
