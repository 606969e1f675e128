# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as one is often written first: correct in eager mode, no step of it replays."""

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    def __init__(self, hidden_size, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())  # 19
        weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return weights, experts


class Expert(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states):
        if hidden_states.shape[0] == 0:  # 8
            return hidden_states
        return self.down(F.silu(self.up(hidden_states)))


class SparseMoe(nn.Module):
    def __init__(self, hidden_size, intermediate_size, num_experts, top_k):
        super().__init__()
        self.gate = Router(hidden_size, num_experts, top_k)
        self.experts = nn.ModuleList(
            [Expert(hidden_size, intermediate_size) for _ in range(num_experts)]
        )

    def forward(self, hidden_states):
        weights, chosen = self.gate(hidden_states)
        out = torch.zeros_like(hidden_states)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))  # 2
        for index, expert in enumerate(self.experts):
            if counts[index] == 0:  # 8
                continue
            rows, slots = torch.where(chosen == index)  # 2
            out.index_add_(0, rows, expert(hidden_states[rows]) * weights[rows, slots, None])
        return out


class CompressedAttention(nn.Module):
    def __init__(self, hidden_size, ratio):
        super().__init__()
        self.ratio = ratio
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.k_cache = None
        self.debug = True

    def compress(self, keys, position: torch.Tensor):
        if (position + 1) % self.ratio != 0:  # 8
            return None
        return keys[-self.ratio :].mean(0, keepdim=True)

    def forward(self, hidden_states, position):
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        if self.k_cache is None:
            self.k_cache = key  # 26
        else:
            self.k_cache = torch.cat([self.k_cache, key])  # 9
        entry = self.compress(key, position)
        length = int(position) + 1  # 1
        mask = torch.arange(length, device=key.device) <= position  # 10
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        if self.debug:
            print("largest score", scores.max())  # 1
        out = scores.softmax(-1) @ value
        return out if entry is None else out + entry


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = CompressedAttention(config.hidden_size, config.ratio)
        self.mlp = SparseMoe(config.hidden_size, config.intermediate_size, config.experts, 2)
        self.events = []

    def forward(self, hidden_states, position):
        hidden_states = hidden_states + self.attention(hidden_states, position)
        torch.cuda.synchronize()  # 14
        return hidden_states + self.mlp(hidden_states)
