# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE-3 drafter with speculators' own model, data loaders and trainer.

Its command line needs packages that do not come with it (`pydantic-settings`) and an accelerator;
its classes need neither, but for what `OnHost` says.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

try:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.dataloader import create_train_val_loaders
    from speculators.train.trainer import Trainer, TrainerConfig
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: {error}; pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 (make "
        "build does), and `datasets` and `rich`"
    ) from error

#: families whose final norm multiplies by one more than the stored weight
_ONE_MORE = ("qwen3_5_text", "qwen3_next")
#: learning rate of matrices, as a multiple of that of vectors; at 7 the loss falls slower
_MUON = 2
_NEVER = 1 << 62


@dataclass(frozen=True)
class Recipe:
    """`depth`: drafts that the drafter is trained for, one after the other; `drafts`: those that it
    makes when it serves. A batch is at most `batch_tokens` long."""

    model: str
    depth: int
    drafts: int
    epochs: int
    learning_rate: float
    batch_tokens: int
    seed: int


class OnHost(Trainer):  # type: ignore[misc]
    """speculators' trainer on a machine without accelerator.

    It would move the model to device 0, and synchronise an accelerator to time every
    `log_freq`-th step, counted from 0: without that step it times nothing.
    """

    def setup_trainer(self) -> None:
        super().setup_trainer()
        self.local_rank = torch.device("cpu")
        self.device_type = "cpu"
        self.global_step += 1

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        """Says how well each draft predicts the validation part, where those before it did."""
        metrics: dict[str, float] | None = super().val_epoch(epoch)
        if metrics is not None:
            rates = [metrics[f"cond_acc_{i}_epoch"] for i in range(self._depth)]
            print(
                f"epoch {epoch + 1}: validation loss {metrics['loss_epoch']:.3f}, right where all "
                f"before were, by position: {', '.join(f'{rate:.3f}' for rate in rates)}"
            )
        return metrics

    @property
    def _depth(self) -> int:
        return int(self.config.val_call_kwargs["ttt_steps"])


def train(data: Path, work: Path, output: Path, recipe: Recipe) -> None:
    """Train on the dataset `data`; the best epoch's checkpoint becomes `output`.

    `work` is emptied and takes the trainer's checkpoints. What the dataset's hidden states are goes
    into the checkpoint's config: a server refuses a drafter that would get others.
    """
    extraction = json.loads((data / "extraction.json").read_text())
    if extraction["layers"] is None:
        raise SystemExit(f"error: {data} does not state its layers; extract it with --layers")
    *layers, last = extraction["layers"]
    torch.manual_seed(recipe.seed)
    logging.getLogger("speculators").setLevel(logging.ERROR)
    shutil.rmtree(work, ignore_errors=True)
    model = new_drafter(recipe, layers)
    config = _trainer_config(recipe, work)
    loaders = create_train_val_loaders(
        data_path=str(data),
        total_seq_len=recipe.batch_tokens,
        hidden_states_dtype=config.hidden_states_dtype,
        # Every sample is there; nothing is asked of a server.
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=recipe.model,
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=model.hidden_size,
        num_target_layers=len(layers),
        num_workers=0,
        prefetch_factor=0,
        preprocess=shift_batch,
        seed=recipe.seed,
    )
    trainer = OnHost if not torch.accelerator.is_available() else Trainer
    with warnings.catch_warnings():
        # That there is no accelerator is known.
        warnings.filterwarnings("ignore", message=".*(pin_memory|In CPU autocast)")
        trainer(model, config, *loaders).run_training()
    best = work / "checkpoint_best"
    if not best.exists():
        raise SystemExit("error: the training was stopped before its first epoch was validated")
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(best / "model.safetensors", output / "model.safetensors")
    config_json = json.loads((best / "config.json").read_text())
    # Of a class beside it, which is not copied.
    config_json.pop("auto_map", None)
    config_json["trained_on"] = {"model": recipe.model, "layers": [*layers, last]}
    (output / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")


def _trainer_config(recipe: Recipe, work: Path) -> TrainerConfig:
    call = {
        "ttt_steps": recipe.depth,
        "ttt_step_loss_decay": 1.0,
        # The fused losses are kernels for accelerators.
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    return TrainerConfig(
        lr=recipe.learning_rate,
        muon_lr=_MUON * recipe.learning_rate,
        # speculators' default; it takes half the epochs of AdamW here.
        optimizer="muon",
        # In bf16, which many CPUs are slow at: its default, 5, takes two fifths of the time.
        muon_ns_steps=3,
        num_epochs=recipe.epochs,
        save_path=str(work),
        train_call_kwargs=call,
        val_call_kwargs=call,
        scheduler_type="cosine",
        scheduler_warmup_ratio=0.05,
        save_best=True,
        hidden_states_dtype=torch.float32,
        log_freq=_NEVER,
    )


def new_drafter(recipe: Recipe, layers: list[int]) -> Any:
    """An untrained drafter of one layer for the target `recipe.model`, with its embeddings."""
    target = AutoConfig.from_pretrained(recipe.model).get_text_config()
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(target),
        draft_vocab_size=target.vocab_size,
        norm_before_residual=True,
        # The embeddings are a tenth as long as the last streams.
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=layers,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=recipe.drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(recipe.model),
        ),
    )
    drafter = Eagle3DraftModel(config)
    _take_weights(drafter, recipe.model, target)
    return drafter


@torch.no_grad()
def _take_weights(drafter: Any, model: str, target: PretrainedConfig) -> None:
    """What the drafter has of its target: embedding, output head and, to make the targets of the
    training, the final norm."""
    weights = load_target(model)
    embedding = weights["embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    drafter.embed_tokens.weight.copy_(embedding)
    drafter.lm_head.weight.copy_(head)
    drafter.verifier_lm_head.weight.copy_(head)
    drafter.verifier_norm.weight.copy_(weights["norm.weight"])
    if target.model_type in _ONE_MORE:
        # The drafter's kind of norm multiplies by the weight itself.
        drafter.verifier_norm.weight.add_(1)


def load_target(model: str) -> dict[str, torch.Tensor]:
    """`embed_tokens.weight`, `norm.weight` and, unless tied, `lm_head.weight` of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                own = name.removeprefix("model.").removeprefix("language_model.")
                if own in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
                    found[own] = file.get_tensor(name)
    if not {"embed_tokens.weight", "norm.weight"} <= found.keys():
        raise SystemExit(f"error: {model} is no local checkpoint with embed_tokens and norm")
    return found


def _layer_config(target: PretrainedConfig) -> LlamaConfig:
    """Of the drafter's layer: as wide as the target's attention layers, full attention."""
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"],
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return config
