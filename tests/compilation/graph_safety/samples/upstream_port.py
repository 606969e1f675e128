# SPDX-License-Identifier: Apache-2.0
"""A port of a sparse model with compressed attention in its first version, as a model's authors
publish one: a reference that is right in eager mode. The numbers are the checklist's."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ModelConfig:
    def __init__(self):
        self.hidden_size = 64
        self.num_heads = 4
        self.streams = 4
        self.index_topk = 16
        self.ratio = 4
        self.num_experts = 8
        self.vocab_size = 128


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * hidden_states).to(dtype)


class HyperConnection(nn.Module):
    """Mixes the streams of the residual by a doubly stochastic matrix."""

    def __init__(self, config):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(config.streams, config.streams))
        self.largest = 0.0

    def sinkhorn(self, matrix: torch.Tensor):
        while (matrix.sum(-1) - 1).abs().max() > 1e-4:  # 11
            matrix = matrix / matrix.sum(-1, keepdim=True)
            matrix = matrix / matrix.sum(-2, keepdim=True)
        return matrix

    def forward(self, streams):
        mixed = torch.einsum("ij,tjd->tid", self.sinkhorn(self.mix.exp()), streams)
        self.largest = max(self.largest, mixed.abs().max().item())  # 1
        return mixed


class Indexer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.topk = config.index_topk
        self.query = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, entries: torch.Tensor, num_entries: torch.Tensor):
        count = num_entries.item()  # 1
        scores = self.query(hidden_states) @ entries[:count].t()  # 10
        if count < self.topk:  # 8
            return torch.arange(count, device=scores.device)  # 10
        return scores.topk(self.topk, dim=-1).indices


class CompressedAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ratio = config.ratio
        self.scale = 1 / math.sqrt(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.indexer = Indexer(config)
        self.register_buffer("entries", torch.zeros(1024, config.hidden_size))
        self.register_buffer("num_entries", torch.zeros((), dtype=torch.int64))
        self.side = torch.cuda.Stream()

    def forward(self, hidden_states, position: torch.Tensor):
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        with torch.cuda.stream(self.side):  # 24
            chosen = self.indexer(hidden_states, self.entries, self.num_entries)
        if (position + 1) % self.ratio == 0:  # 5
            self.entries[self.num_entries] = key.mean(0)
            self.num_entries = self.num_entries + 1  # 17
        torch.cuda.synchronize()  # 14
        keys = self.entries[chosen]
        visible = chosen >= 0
        kept = keys[visible]  # 2
        scores = (query @ kept.transpose(-1, -2)) * self.scale
        return scores.softmax(-1) @ value


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.up = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, config.hidden_size)
        )
        self.register_buffer("offsets", torch.zeros(config.num_experts + 1, dtype=torch.int32))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.gate.float())  # 19
        chosen = logits.argmax(-1)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()  # 2 1
        total = 0
        for expert, count in enumerate(counts):  # 3
            total += count
            self.offsets[expert + 1] = total  # 4
        out = torch.zeros_like(hidden_states)
        for expert in chosen.unique():  # 2 3
            rows = (chosen == expert).nonzero().squeeze(-1)  # 2
            out[rows] = hidden_states[rows] @ self.up[expert]
        return out


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.connection = HyperConnection(config)
        self.norm = RMSNorm(config.hidden_size)
        self.attention = CompressedAttention(config)
        self.experts = Experts(config)

    def forward(self, streams, position: torch.Tensor):
        streams = self.connection(streams)
        hidden_states = self.norm(streams.mean(1))
        hidden_states = hidden_states + self.attention(hidden_states, position)
        return streams + self.experts(hidden_states).unsqueeze(1)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(2)])
        self.norm = RMSNorm(config.hidden_size)
        self.streams = config.streams

    def forward(self, input_ids, position: torch.Tensor):
        streams = self.embed(input_ids).unsqueeze(1).repeat(1, self.streams, 1)
        for block in self.blocks:
            streams = block(streams, position)
        hidden_states = self.norm(streams.mean(1))
        self.hidden_for_mtp = hidden_states  # 26
        token = (hidden_states @ self.embed.weight.t()).argmax(-1)
        next_id = token.item()  # 12
        return torch.tensor([next_id], device=input_ids.device)  # 7
