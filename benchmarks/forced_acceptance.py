# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding gains where each draft is accepted with a given probability.

    python -m benchmarks.forced_acceptance docs/measurements/h200_drafts.json

Random weights on the dimensions of a 4B Qwen3.5; drafters with random weights on theirs, which cost
what trained ones cost: an EAGLE-3 head (one layer, 32,000 of the tokens) run once per draft, and a
DFlash drafter (five layers) run once per step. The final norm of the target is set to zero, so that
all its tokens are the same one: drafts are replaced by that token with the probability, and by
another one else, drawn by position with a seed. `verify` has drafts that cost nothing. `--arms
dflash:7` verifies so many. The engine without drafts runs first and again last: the GPU's clock
falls while it is hot, and the two say how much of a difference that is.

Rates are without the prompt. `predicted`: tokens per step, divided by the policy's cost of the
wider step and the bytes of weights that drafting reads, in those of a plain step. Needs one GPU of
at least 40 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.offline import default_settings, parse_settings
from vllm.config.draft_methods import DRAFT_METHODS, DraftMethod
from vllm.kernels.step import Progress
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.spec_decode.dflash_drafter import DFlashDrafter
from vllm.v1.spec_decode.drafter import DraftStep
from vllm.v1.spec_decode.head_drafter import Eagle3Drafter

#: requests at once -> tokens of each
TOKENS = {1: 512, 8: 512, 256: 96}
_PROMPT, _ALWAYS = 128, 0
#: of the drafters' layers; their width and vocabulary are the target's
LAYER = {
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_DRAFT_VOCAB = 32000
#: what is drafted by -> drafts per step, where an arm does not say: `dflash:7`
DRAFTS = {"verify": 3, "eagle3": 3, "dflash": 7}
#: the engines without drafts, before all others and after them
PLAIN = ("none:0", "none:again")


def parts_of(arm: str) -> tuple[str, int]:
    """What drafts, and how many drafts a step verifies."""
    kind, _, drafts = arm.partition(":")
    return kind, 0 if arm in PLAIN else int(drafts or DRAFTS[kind])


class Forced:
    """Drafts of which each is accepted with a probability, in the place of a drafter's."""

    acceptance = float(os.environ.get("FORCED_ACCEPTANCE", "0.8"))

    def __init__(self, progress: Progress, longest: int) -> None:
        draws = torch.Generator().manual_seed(1)
        right = torch.rand(longest + 16, generator=draws) < self.acceptance
        # By position: the token that always comes, or another.
        self._drafts = torch.where(right, _ALWAYS, _ALWAYS + 1).to(progress.tokens.device)
        self._ahead = torch.arange(1, progress.width, device=progress.tokens.device)
        self._progress = progress

    def replace(self) -> None:
        positions = self._progress.computed.long().unsqueeze(1) + self._ahead
        positions.clamp_(max=len(self._drafts) - 1)
        self._progress.tokens[:, 1:] = self._drafts[positions]


class ForcedEagle3(Eagle3Drafter):
    """Runs the head, and proposes something else."""

    def propose(self, step: DraftStep) -> None:
        super().propose(step)
        if step.num_drafts:
            _forced(self).replace()


class ForcedDFlash(DFlashDrafter):
    """Runs the block, and proposes something else."""

    def propose(self, step: DraftStep) -> None:
        super().propose(step)
        if step.num_drafts:
            _forced(self).replace()


_made: dict[int, Forced] = {}


def _forced(drafter: ForcedEagle3 | ForcedDFlash) -> Forced:
    if id(drafter) not in _made:
        longest = drafter.vllm_config.model_config.max_model_len
        _made[id(drafter)] = Forced(drafter.progress, longest)
    return _made[id(drafter)]


def checkpoint(kind: str, drafts: int, model: str, folder: Path) -> Path:
    """A drafter's config in the speculators format, without weights."""
    target = json.loads((Path(model) / "config.json").read_text())
    target = target.get("text_config", target)
    count = target["num_hidden_layers"]
    layers = {key: target[key] for key in ("vocab_size", "hidden_size")}
    if kind == "eagle3":
        layers |= {"model_type": "llama", "num_hidden_layers": 1}
        own: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, count // 2, count - 1]}
    else:
        layers |= {"model_type": "qwen3", "num_hidden_layers": 5}
        ids = sorted({1 + i * (count - 2) // 4 for i in range(5)})
        own = {"aux_hidden_state_layer_ids": ids, "mask_token_id": target["vocab_size"] - 1}
        own |= {"block_size": drafts + 1}
    config = own | {
        "architectures": [{"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel"}[kind]],
        "speculators_model_type": kind,
        "draft_vocab_size": min(_DRAFT_VOCAB, target["vocab_size"]),
        "transformer_layer_config": layers | LAYER,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": None},
        },
    }
    path = folder / kind
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def speculation(arm: str, model: str, folder: Path, acceptance: float) -> dict[str, Any] | None:
    """What an arm passes as `speculative_config`."""
    kind, drafts = parts_of(arm)
    if kind == "none":
        return None
    settings: dict[str, Any] = {"num_speculative_tokens": drafts}
    if kind == "verify":
        return settings | {"method": "replay", "acceptance": acceptance, "seed": 1}
    return settings | {"method": kind, "model": str(checkpoint(kind, drafts, model, folder))}


def _bytes(worker: Any) -> tuple[int, int]:
    """Of weights: the target's, which one step reads (its output head is its embedding), and the
    drafter's, without an embedding, which one pass reads."""
    target, *others = worker.model_runner.models
    embedded = next(target.parameters()).shape[0]
    own = [p for model in others for p in model.parameters() if p.shape[0] != embedded]
    return (
        sum(p.numel() * p.element_size() for p in target.parameters()),
        sum(p.numel() * p.element_size() for p in own),
    )


def _always_one_token(worker: Any) -> None:
    """All logits become zero."""
    for name, parameter in worker.model_runner.model.named_parameters():
        if name.endswith("model.norm.weight"):
            # Scales are stored less one.
            parameter.data.fill_(-1)


def measure(
    arm: str, acceptance: float, words: list[str], tokens_of: dict[int, int] | None = None
) -> dict[str, Any]:
    """One engine: rates and steps by number of requests, of which each makes so many tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["FORCED_ACCEPTANCE"] = str(acceptance)
    assert isinstance(DRAFT_METHODS, dict)
    for name, forced in (("eagle3", ForcedEagle3), ("dflash", ForcedDFlash)):
        own = f"benchmarks.forced_acceptance.{forced.__name__}"
        DRAFT_METHODS[name] = DraftMethod(DRAFT_METHODS[name].settings, own)
    from vllm import LLM, SamplingParams, TokensPrompt

    with tempfile.TemporaryDirectory() as folder:
        settings = default_settings() | parse_settings(words)
        settings["speculative_config"] = speculation(
            arm, settings["model"], Path(folder), acceptance
        )
        llm = LLM(**settings)
    llm.collective_rpc(_always_one_token)
    target, drafter = llm.collective_rpc(_bytes)[0]
    found: dict[str, Any] = {"weights_bytes": target, "drafter_bytes": drafter}

    def generate(count: int, tokens: int) -> tuple[float, list[Any]]:
        prompts = [
            TokensPrompt(prompt_token_ids=[(i + 7 * j) % 200 + 20 for j in range(_PROMPT)])
            for i in range(count)
        ]
        more: dict[str, Any] = (
            {"extra_args": {"draft_token_ids": [_ALWAYS] * tokens}}
            if parts_of(arm)[0] == "verify"
            else {}
        )
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
        )
        started = time.perf_counter()
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return time.perf_counter() - started, outputs

    for count, tokens in (tokens_of or TOKENS).items():
        generate(count, 64)
        seconds = []
        for _ in range(2):
            prompt_s = min(generate(count, 1)[0] for _ in range(2))
            taken, outputs = generate(count, tokens)
            seconds.append(taken - prompt_s)
        if any(set(out.token_ids) != {_ALWAYS} for out in outputs):
            raise SystemExit(f"error: other tokens: {sorted(set(outputs[0].token_ids))[:8]}")
        accepted = [(out.num_drafts or (0, 0))[0] for out in outputs]
        made = count * (tokens - 1)
        steps = tokens - 1 - min(accepted)
        found[str(count)] = {
            "tokens_per_s": made / min(seconds),
            "tokens_per_step": (tokens - 1) / steps,
            "step_us": min(seconds) / steps * 1e6,
            "runs_s": seconds,
        }
    return found


def mean_tokens(drafts: int, acceptance: float) -> float:
    """Per step: the accepted drafts before the first that is not, and the token after them."""
    return sum(acceptance**i for i in range(drafts + 1))


def predicted(arm: str, count: int, acceptance: float, found: dict[str, Any]) -> float:
    """Rate with as many drafts as pay best by the rate without."""
    kind, drafts = parts_of(arm)
    policy = DraftPolicy(drafts)
    passes = [k if kind == "eagle3" else min(k, 1) for k in range(1 + drafts)]
    once = found[arm]["drafter_bytes"]
    policy.use_weights_read(found[arm]["weights_bytes"], [once * times for times in passes])
    return max(mean_tokens(k, acceptance) / policy.slowdown(count, k) for k in policy.ladder)


def without_drafts(result: dict[str, Any], count: int) -> tuple[dict[str, float], float]:
    """The mean of the two engines without drafts, and by how much the slower one's step is longer,
    in steps of the faster one."""
    first, last = (result[name][str(count)] for name in PLAIN)
    mean = {key: (first[key] + last[key]) / 2 for key in ("tokens_per_s", "step_us")}
    return mean, abs(first["step_us"] - last["step_us"]) / min(first["step_us"], last["step_us"])


def rows_of(arm: str, result: dict[str, Any], acceptance: float) -> list[dict[str, Any]]:
    """One row per number of requests, beside the engines without drafts."""
    rows = []
    for count in TOKENS:
        plain, spread = without_drafts(result, count)
        row = result[arm][str(count)]
        ratio = predicted(arm, count, acceptance, result)
        # The draws of so many positions accept a little more or less than their mean.
        drafted = row["tokens_per_step"] > 1.1
        mean = mean_tokens(parts_of(arm)[1], acceptance) if drafted else 1.0
        rows.append(
            {
                "drafter": arm,
                "drafts": parts_of(arm)[1],
                "requests": count,
                "tokens_per_s": round(row["tokens_per_s"]),
                "tokens_per_step": round(row["tokens_per_step"], 2),
                "step_us": round(row["step_us"]),
                "plain_us": round(plain["step_us"]),
                "plain_spread": round(spread, 3),
                "step_by_plain": round(row["step_us"] / plain["step_us"], 3),
                "ratio_at_mean": round(mean * plain["step_us"] / row["step_us"], 2),
                "ratio": round(row["tokens_per_s"] / plain["tokens_per_s"], 2),
                "predicted": round(ratio, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--arms", default=",".join(DRAFTS))
    parser.add_argument("--one", action="store_true", help="measure one arm in this process")
    args = parser.parse_args()
    if args.one:
        args.output.write_text(json.dumps(measure(args.arms, args.acceptance, args.settings)))
        return
    result: dict[str, Any] = {}
    found: dict[str, Any] = {"acceptance": args.acceptance, "rows": []}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    arms = args.arms.split(",")
    for arm in (PLAIN[0], *arms, PLAIN[1]):
        command = [sys.executable, "-m", "benchmarks.forced_acceptance", str(args.output)]
        command += [*args.settings, "--acceptance", str(args.acceptance), "--arms", arm, "--one"]
        subprocess.run(command, check=True)
        result[arm] = json.loads(args.output.read_text())
    for arm in arms:
        found["rows"] += rows_of(arm, result, args.acceptance)
    for row in found["rows"]:
        print(json.dumps(row), flush=True)
    args.output.write_text(json.dumps(found | {"arms": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
