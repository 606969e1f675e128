# SPDX-License-Identifier: Apache-2.0
"""What Triton kernels share: launch parameters, launching, compiling ahead.

Device functions carry no annotations but `tl.constexpr`: their arguments are traced values.
"""
