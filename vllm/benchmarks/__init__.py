# SPDX-License-Identifier: Apache-2.0
"""`vllm bench`: load on a server, and latency, throughput and start-up of an engine."""
