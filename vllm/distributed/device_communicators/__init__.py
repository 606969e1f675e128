# SPDX-License-Identifier: Apache-2.0
"""Communication of one kind of device, beside torch's."""
