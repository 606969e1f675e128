# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the Triton kernels run in the interpreter, which is chosen before their import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
