# SPDX-License-Identifier: Apache-2.0
"""Parts of `ExampleHiddenStatesConnector`: cached rows to files."""
