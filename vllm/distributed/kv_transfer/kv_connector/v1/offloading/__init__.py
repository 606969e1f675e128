# SPDX-License-Identifier: Apache-2.0
"""State kept in host memory and files; see docs/offloading.md."""
