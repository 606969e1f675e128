# SPDX-License-Identifier: Apache-2.0
"""Several API processes in front of one engine core (`--api-server-count`)."""
