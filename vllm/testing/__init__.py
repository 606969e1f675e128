# SPDX-License-Identifier: Apache-2.0
"""What authors of models, kernels and plugins test their code with."""
