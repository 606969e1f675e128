# SPDX-License-Identifier: Apache-2.0
"""Ways in: offline, command line, HTTP."""
