# SPDX-License-Identifier: Apache-2.0
"""Bodies of the HTTP interface, one module per concern."""
