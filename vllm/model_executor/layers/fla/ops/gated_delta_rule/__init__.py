# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule: the plain torch definition, the chunked and the recurrent kernels."""
