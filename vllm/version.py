# SPDX-License-Identifier: Apache-2.0
"""The package's version."""

__version__ = "0.24.0+hybrid.1"
__version_tuple__ = (0, 24, 0, "hybrid.1")
