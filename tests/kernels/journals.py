# SPDX-License-Identifier: Apache-2.0
"""Two layers' decode steps with and without a journal: random commits, flushes and drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import gdn_decode_case, randn, strided
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import JournalMemory, JournalShape, JournalSize, JournalStack
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

SMALL = (1, 2, 16, 24)
#: tokens that wait for their commit at most
SLOTS = 3
PROJECTED = ("qkv", "a", "b")


@dataclass
class Layers:
    """Two layers' decode cases, whose states lie in one buffer as in the arena."""

    cases: list[dict[str, Any]]

    def copy(self) -> Layers:
        """The same with states of their own, in one buffer again."""
        states = torch.stack([case["ssm_state"] for case in self.cases])
        conv_states = torch.stack([case["conv_state"] for case in self.cases])
        return Layers(
            [
                case | dict(ssm_state=state, conv_state=conv_state)
                for case, state, conv_state in zip(self.cases, states, conv_states, strict=True)
            ]
        )

    def states(self) -> list[Tensor]:
        used = self.cases[0]["state_indices"].long()
        used = used[used >= 0]
        return [case[name][used] for case in self.cases for name in ("ssm_state", "conv_state")]


def two_layers(num_seqs: int, heads: tuple[int, int, int, int], dtype, device, **kwargs) -> Layers:
    cases = [gdn_decode_case(num_seqs, heads, dtype, device, **kwargs) for _ in range(2)]
    for name in ("state_indices", "ssm_state", "conv_state"):
        first = cases[0][name]
        cases[1][name] = first if name == "state_indices" else randn(
            *first.shape, dtype=first.dtype, device=device, scale=0.3
        )  # fmt: skip
    return Layers(cases).copy()


def rings(
    layers: Layers, heads: tuple[int, int, int, int], rows: int, width: int = 1
) -> JournalStack:
    states, conv_states = (
        [case[name] for case in layers.cases] for name in ("ssm_state", "conv_state")
    )
    device, conv = states[0].device, conv_states[0]
    shape = JournalShape(*heads, states[0].dtype, channels=conv.shape[2], input_dtype=conv.dtype)
    memory = JournalMemory.create(shape, 2, rows, JournalSize(SLOTS + width - 1, width), device)
    for tensor in memory.tensors:
        tensor.fill_(float("nan"))
    steps = torch.full((len(layers.cases[0]["state_indices"]), 4), -1, dtype=torch.int32)
    counts = tuple(torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
    return memory.stack(steps.to(device), counts, states, conv_states)


class Schedule:
    """Random commits, flushes and changes of row; what is pending, as the host knows it."""

    def __init__(self, num_seqs: int, stack: JournalStack, seed: int) -> None:
        self.random, self.stack = random.Random(seed), stack
        self.rows = list(range(num_seqs))
        self.pending = [0] * num_seqs

    def begin(self, kernels: Kernels, layers: Layers) -> None:
        """Tell the step what each sequence does, after flushing some of them."""
        flushed = [i for i, n in enumerate(self.pending) if n and self.random.random() < 0.15]
        self.flush(kernels, layers, flushed)
        spare = [r for r in range(self.stack.keys.shape[1]) if r not in self.rows]
        for i in flushed:
            self.rows[i], spare[0] = spare[0], self.rows[i]
        for i, pending in enumerate(self.pending):
            commits = pending == SLOTS or self.random.random() < 0.2
            self.stack.steps[i] = torch.tensor([self.rows[i], pending, int(commits), 0])
            self.pending[i] = 0 if commits else pending + 1
            self.stack.pending[self.rows[i]] = self.pending[i]

    def flush(self, kernels: Kernels, layers: Layers, which: list[int]) -> None:
        indices = layers.cases[0]["state_indices"].tolist()
        entries = [[self.rows[i], indices[i]] for i in which]
        if entries:
            device = self.stack.keys.device
            kernels.gdn_commit(self.stack, torch.tensor(entries, dtype=torch.int32, device=device))
        for i in which:
            self.pending[i] = 0


def run(
    kernels: Kernels, layers: Layers, stack: JournalStack | None, steps: int, seed: int = 0
) -> list[Tensor]:
    """Outputs of `steps` random tokens per sequence; at the end nothing is pending."""
    case = layers.cases[0]
    num_seqs = int((case["state_indices"] >= 0).sum())
    schedule = None if stack is None else Schedule(num_seqs, stack, seed)
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(steps):
        if schedule is not None:
            schedule.begin(kernels, layers)
        for i, case in enumerate(layers.cases):
            for name in ("qkv", "a", "b"):
                value = torch.randn(case[name].shape, generator=generator)
                case[name] = strided(value.to(case[name].dtype).to(case[name].device))
            out = torch.full_like(case["out"], float("nan"))
            ring = None if stack is None else stack.layer(i)
            kernels.gdn_decode(GdnDecode(**case | dict(out=out), journal=ring))
            outputs.append(out[:num_seqs])
    if schedule is not None:
        schedule.flush(kernels, layers, [i for i, n in enumerate(schedule.pending) if n])
    return outputs


def both_ways(kernels: Kernels, layers: Layers, heads: Any, steps: int, seed: int = 0) -> bool:
    """Whether deferred outputs and states have the bits of immediate ones."""
    at_once, later = layers.copy(), layers.copy()
    expected = run(kernels, at_once, None, steps, seed)
    rows = len(layers.cases[0]["state_indices"]) + 5
    found = run(kernels, later, rings(later, heads, rows), steps, seed)
    pairs = zip(found + later.states(), expected + at_once.states(), strict=True)
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in pairs)


class Verifier:
    """Decodes known tokens `width` at a time: after the newest come drafts, of which a random
    number are the tokens that follow, and are then accepted."""

    def __init__(self, stack: JournalStack, num_seqs: int, interval: int, seed: int) -> None:
        self.random, self.stack, self.interval = random.Random(seed), stack, interval
        self.size = JournalSize(interval - 1 + stack.inputs.shape[2], stack.inputs.shape[2] + 1)
        self.done = [0] * num_seqs
        self.accepted: list[set[int]] = [set() for _ in range(num_seqs)]

    def step(self, kernels: Kernels, layers: Layers, tokens: list[dict[str, Tensor]], width: int):
        """Outputs of each sequence's accepted tokens, by layer: `[(sequence, token, output)]`."""
        stack, found = self.stack, []
        n = len(self.done)
        right = [min(self.random.randint(1, width), len(tokens[0]["qkv"]) - d) for d in self.done]
        for i in range(n):
            pending, first = int(stack.pending[i]), int(stack.first[i])
            commits = self.random.random() < 0.3 or pending + width > self.size.most_pending
            stack.steps[i] = torch.tensor([i, pending, int(commits), first])
            moved = (first + pending) % self.size.places if width > 1 else 0
            stack.first[i] = moved if commits else first
            stack.pending[i] = 0 if commits else pending + 1
        for layer, case in enumerate(layers.cases):
            given = {name: self.drafted(tokens[layer][name], right, width) for name in PROJECTED}
            heads = case["out"].shape[1:]
            out = given["qkv"].new_full((n * width, *heads), float("nan"))
            index = case["state_indices"][:n]
            call = case | given | dict(out=out, state_indices=index)
            kernels.gdn_decode(GdnDecode(**call, journal=stack.layer(layer)))
            for i in range(n):
                found += [(layer, i, self.done[i] + t, out[i * width + t]) for t in range(right[i])]
        for i in range(n):
            stack.pending[i] += right[i] - 1
            stack.taken[i] = right[i] - 1
            self.done[i] += right[i]
            self.accepted[i].add(right[i])
        return found

    def drafted(self, tokens: Tensor, right: list[int], width: int) -> Tensor:
        rows = torch.randn(len(right) * width, *tokens.shape[2:]).to(tokens.dtype).to(tokens.device)
        for i, count in enumerate(right):
            rows[i * width : i * width + count] = tokens[self.done[i] : self.done[i] + count, i]
        return strided(rows)


def verified(kernels: Kernels, layers: Layers, heads: Any, width: int, steps: int, seed: int = 0):
    """The largest difference that decoding with drafts makes to outputs and, once flushed, to
    states; NaN if anything is left unwritten."""
    plain, wide = layers.copy(), layers.copy()
    num_seqs = int((layers.cases[0]["state_indices"] >= 0).sum())
    length = steps * width
    tokens = [
        {
            name: randn(
                length, num_seqs, *case[name].shape[1:], dtype=case[name].dtype,
                device=case[name].device,
            )
            for name in PROJECTED
        }
        for case in layers.cases
    ]  # fmt: skip
    stack = rings(wide, heads, num_seqs, width)
    verifier = Verifier(stack, num_seqs, SLOTS + 1, seed)
    found = {}
    for step in range(steps):
        now = 1 if step % 4 == 3 else width
        for layer, i, token, out in verifier.step(kernels, wide, tokens, now):
            found[layer, i, token] = out
    assert all(len(accepted) > 1 for accepted in verifier.accepted)
    entries = [[i, int(layers.cases[0]["state_indices"][i])] for i in range(num_seqs)]
    kernels.gdn_commit(stack, torch.tensor(entries, dtype=torch.int32, device=stack.keys.device))
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer, case in enumerate(plain.cases):
        for i, done in enumerate(verifier.done):
            for token in range(done):
                given = {name: tokens[layer][name][token, i : i + 1] for name in PROJECTED}
                out = torch.full_like(case["out"][:1], float("nan"))
                index = case["state_indices"][i : i + 1]
                kernels.gdn_decode(GdnDecode(**case | given | dict(out=out, state_indices=index)))
                pairs.append((out[0], found[layer, i, token]))
    pairs += zip(wide.states(), plain.states(), strict=True)
    # Python's max would pass over NaN.
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
