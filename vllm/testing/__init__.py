# SPDX-License-Identifier: Apache-2.0
"""What authors of plugins test their classes with."""
