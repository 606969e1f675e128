# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages`: Anthropic's protocol, over the chat route."""
