# SPDX-License-Identifier: Apache-2.0
"""Finding launch parameters by measurement, for `vllm tune`; nothing here runs while serving."""
