# SPDX-License-Identifier: Apache-2.0
"""State from one engine to another: who computes a prompt need not be who answers it."""
