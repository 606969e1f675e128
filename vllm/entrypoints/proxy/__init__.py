# SPDX-License-Identifier: Apache-2.0
"""One address before engines that compute prompts and engines that answer them."""
