# SPDX-License-Identifier: Apache-2.0
"""The same questions to a GPU: does a step wait, does a replay compute what eager launches do."""
