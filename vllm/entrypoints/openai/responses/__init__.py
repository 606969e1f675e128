# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: OpenAI's protocol for agents, over the chat route."""
