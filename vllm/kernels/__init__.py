# SPDX-License-Identifier: Apache-2.0
"""Layer kernels: one interface, three implementations."""
