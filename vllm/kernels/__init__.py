# SPDX-License-Identifier: Apache-2.0
"""Layer kernels: a table of ops (`interface.py`), a folder per op with its implementations."""
