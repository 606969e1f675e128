# SPDX-License-Identifier: Apache-2.0
"""`vllm bench acceptance`: how many drafts would be accepted, without serving.

A dataset of hidden states (docs/extraction.md) has all that a head on the target reads. Where its
tokens are the target's own, each round of speculation over them is known: the head drafts, the
tokens say what the target accepts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import PositiveInt
from tqdm import tqdm

from vllm.benchmarks.offline import save_json
from vllm.exceptions import VLLMValidationError
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.options import config, option
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.config.draft_methods.base import DraftSettings
    from vllm.config.model import ModelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

#: of a dataset
_COLUMNS = ("input_ids", "loss_mask", "seq_len")
DESCRIPTION = "Predict how many drafts of a head a target would accept, from a dataset."


@config
class AcceptanceArgs:
    """What drafts, for whom, and over which tokens."""

    model: str = option(default="", help="The target: name or directory.")
    drafter: str = option(
        default="", help="Checkpoint of the head; the target's own for the head in it."
    )
    dataset: str = option(
        default="",
        help="Directory of hidden states; rounds are counted where its loss mask is 1.",
    )
    num_speculative_tokens: int | None = option(
        default=None, help="Drafts per round (default: what the head's checkpoint says)."
    )
    num_samples: PositiveInt | None = option(default=None, help="Read only the first ones.")
    output_json: str | None = option(default=None, help="File for the result.")
    plot: str | None = option(default=None, help="PNG file for a picture; needs matplotlib.")


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, AcceptanceArgs, "Acceptance")


def main(namespace: argparse.Namespace) -> int:
    """Run the prediction."""
    args = from_namespace(AcceptanceArgs, namespace)
    for name in ("output_json", "plot"):
        check_file(name, getattr(args, name))
    for name in ("model", "drafter", "dataset"):
        if not getattr(args, name):
            raise VLLMValidationError(f"--{name} must be given", name)
    if args.plot:
        from vllm.benchmarks.plot import require_matplotlib

        require_matplotlib()
    counts = predict(args)
    if not counts.drafts:
        raise VLLMValidationError(f"--dataset {args.dataset}: no sample has a token to draft for")
    for position, rate in enumerate(counts.rates, 1):
        print(f"Acceptance rate at position {position}: {rate:.4f}")
    print(f"Mean acceptance length: {counts.length:.4f} over {counts.drafts} rounds")
    save_json(args.output_json, as_result(counts))
    if args.plot:
        _save_picture(args.plot, counts)
    return 0


def as_result(counts: RoundCounts) -> dict[str, Any]:
    """The keys of `vllm bench serve`'s result."""
    return {
        "spec_decode_acceptance_length": counts.length,
        "spec_decode_num_drafts": counts.drafts,
        "spec_decode_draft_tokens": counts.draft_tokens,
        "spec_decode_accepted_tokens": sum(counts.per_position),
        "spec_decode_per_position_acceptance_rates": counts.rates,
    }


class Predicts(Protocol):
    """One kind of drafter."""

    def drafts(self, streams: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """`streams [n, layers read, hidden]`, `token_ids [n + 1]` of the rows and the one after.
        Returns `[n, depth]` ids: row t has the drafts of the tokens at t + 2 and later."""
        ...


def predict(args: AcceptanceArgs) -> RoundCounts:
    """Draft after every token of the dataset, and count the rounds."""
    import torch

    from vllm.engine.arg_utils import EngineArgs

    target = EngineArgs(model=args.model).create_engine_config().model_config
    settings = _settings(args, target)
    depth = settings.num_drafts
    output = target.get_num_layers()
    # The head of the target's own checkpoint reads its output.
    read = settings.layer_ids or (output,)
    trained_on = list(dict.fromkeys((*read, output)))
    dataset = HiddenStateDataset.open(Path(args.dataset), args.num_samples, trained_on)
    columns = dataset.columns_of(read)
    drafter = _drafter(settings, target, args.drafter, dataset.longest)
    counts = RoundCounts(depth)
    for sample in tqdm(dataset.samples(), "Drafting", dataset.num_samples, dynamic_ncols=True):
        ids = sample.token_ids
        _check_target(sample, target)
        if len(ids) < 2:
            continue
        streams = sample.hidden_states[:-1, columns]
        drafts = drafter.drafts(streams, torch.tensor(ids), depth).tolist()
        for start, stop in replies(sample.loss_mask):
            count_rounds(counts, ids, drafts, range(start, stop))
    return counts


def _check_target(sample: StoredSample, target: ModelConfig) -> None:
    """`VLLMValidationError` for a sample of another model."""
    width, most = sample.hidden_states.shape[-1], max(sample.token_ids, default=0)
    if width != target.get_hidden_size() or most >= target.get_vocab_size():
        raise VLLMValidationError(
            f"--dataset has hidden states of {width} and token {most}; those of --model "
            f"{target.model} are of {target.get_hidden_size()}, and its tokens below "
            f"{target.get_vocab_size()}",
            "dataset",
        )


def _settings(args: AcceptanceArgs, target: ModelConfig) -> DraftSettings:
    """As a server would resolve them, with its checks. `VLLMValidationError` for a drafter that
    reads no hidden states."""
    from vllm.config.draft_methods import resolve_method, settings_of

    own = Path(args.drafter).resolve() == Path(args.model).resolve()
    method = "mtp" if own else resolve_method(None, args.drafter)
    given: dict[str, Any] = {"model": args.drafter}
    if args.num_speculative_tokens is not None:
        given["num_speculative_tokens"] = args.num_speculative_tokens
    if method not in ("dflash", "eagle3", "mtp"):
        raise VLLMValidationError(
            f"--drafter {args.drafter} drafts by {method}, which reads no hidden states of a "
            "dataset; dflash, eagle3 and mtp do",
            "drafter",
        )
    return settings_of(method, given).resolved(target, None)


def _drafter(
    settings: DraftSettings, target: ModelConfig, checkpoint: str, longest: int
) -> Predicts:
    """The plain form of what the settings name, for sequences of up to `longest` tokens."""
    from vllm.benchmarks.block_drafts import BlockDrafts
    from vllm.benchmarks.draft_chains import DraftChains
    from vllm.benchmarks.mtp_chains import MtpChains
    from vllm.benchmarks.target_tensors import TargetTensors, checkpoint_tensors
    from vllm.config.draft_methods.dflash import DFlashSettings
    from vllm.config.draft_methods.eagle3 import Eagle3Settings

    tensors, shared = dict(checkpoint_tensors(checkpoint)), TargetTensors(str(target.model))
    if isinstance(settings, Eagle3Settings):
        return DraftChains(settings.draft.hf_config, tensors, longest)
    if isinstance(settings, DFlashSettings):
        return BlockDrafts(settings.draft.hf_config, tensors, shared, longest)
    return MtpChains(target.hf_text_config, tensors, shared, longest)


def _save_picture(path: str, counts: RoundCounts) -> None:
    from matplotlib.figure import Figure

    from vllm.benchmarks.plot import plot_acceptance

    figure = Figure(figsize=(6, 4), layout="constrained")
    plot_acceptance(figure.subplots(), counts.rates)
    figure.savefig(path, dpi=120)
    print(f"saved: {path}")


@dataclass(frozen=True)
class StoredSample:
    """`hidden_states [n, columns, hidden]` of `n` tokens."""

    token_ids: list[int]
    loss_mask: list[int]
    hidden_states: Tensor


@dataclass(frozen=True)
class HiddenStateDataset:
    """A directory that docs/extraction.md describes; `layers`: ids of its columns, and `source`,
    who says so."""

    path: Path
    layers: list[int]
    source: str
    rows: Any
    num_samples: int

    @classmethod
    def open(cls, path: Path, limit: int | None, trained_on: list[int]) -> HiddenStateDataset:
        """`trained_on`: the layers of a directory without extraction.json, as speculators' commands
        make it for a drafter's training, if its files do not say theirs. Raises
        `VLLMValidationError` for what is no dataset."""
        try:
            import datasets
        except ModuleNotFoundError:
            raise VLLMValidationError(
                "vllm bench acceptance needs the datasets library: pip install datasets"
            ) from None
        settings = path / "extraction.json"
        if not path.is_dir():
            raise VLLMValidationError(f"--dataset {path} is no directory", "dataset")
        if not (path / "hidden_states").is_dir():
            raise VLLMValidationError(
                f"--dataset {path} has no hidden_states: make them with "
                "examples/extract_hidden_states.py, examples/train_drafter.py or "
                "`speculators generate-offline-data`",
                "dataset",
            )
        layers, source = trained_on, "on which --drafter is trained"
        try:
            if settings.is_file():
                source = "as the dataset says"
                layers = json.loads(settings.read_text()).get("layers")
            elif (said := _layers_of(_file(path, 0))) is not None:
                layers, source = said, "as its first file says"
            rows = datasets.load_from_disk(str(path)).with_format(None)
        except (AttributeError, IndexError, OSError, ValueError) as error:
            raise VLLMValidationError(
                f"--dataset {path} cannot be read: {error}", "dataset"
            ) from None
        if not isinstance(layers, list):
            raise VLLMValidationError(
                f"--dataset {path} does not state its layers; extract it with --layers", "dataset"
            )
        absent = [name for name in _COLUMNS if name not in rows.column_names]
        if absent:
            raise VLLMValidationError(
                f"--dataset {path} has no column {', '.join(absent)}", "dataset"
            )
        count = len(rows) if limit is None else min(limit, len(rows))
        return cls(path, layers, source, rows, count)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(self.rows[: self.num_samples]["seq_len"], default=0)

    def columns_of(self, layer_ids: tuple[int, ...]) -> list[int]:
        """Where the streams after `layer_ids` layers are."""
        absent = [i for i in layer_ids if i not in self.layers]
        if absent:
            raise VLLMValidationError(
                f"--drafter reads hidden states {list(layer_ids)}, but --dataset {self.path} has "
                f"those of {self.layers}; extract it with --layers {' '.join(map(str, layer_ids))} "
                f"{self.layers[-1]}",
                "dataset",
            )
        return [self.layers.index(i) for i in layer_ids]

    def samples(self) -> Iterator[StoredSample]:
        """One after the other; `VLLMValidationError` for one whose file does not fit."""
        from safetensors import SafetensorError

        from vllm.hidden_states_storage import read_hidden_states, stored_layer_ids

        for index in range(self.num_samples):
            row = self.rows[index]
            file = _file(self.path, index)
            if not file.is_file():
                raise VLLMValidationError(
                    f"--dataset has no {file}: make it, or read only the samples before it with "
                    "--num-samples",
                    "dataset",
                )
            try:
                stored = read_hidden_states(file)
                layers = stored_layer_ids(file)
            except (SafetensorError, ValueError) as error:
                raise VLLMValidationError(f"{file} cannot be read: {error}", "dataset") from None
            if layers is not None and layers != self.layers:
                raise VLLMValidationError(
                    f"{file} holds those of layers {layers}, not {self.layers}, {self.source}",
                    "dataset",
                )
            ids, mask, states = row["input_ids"], row["loss_mask"], stored["hidden_states"]
            if stored["token_ids"].tolist() != ids or len(mask) != len(ids):
                raise VLLMValidationError(f"{file} holds other tokens than the dataset", "dataset")
            if states.shape[:2] != (len(ids), len(self.layers)):
                raise VLLMValidationError(
                    f"{file} holds {list(states.shape)} numbers, not those of {len(ids)} tokens "
                    f"after {self.layers} layers, {self.source}",
                    "dataset",
                )
            yield StoredSample(ids, mask, states)


def _file(dataset: Path, index: int) -> Path:
    return dataset / "hidden_states" / f"hs_{index}.safetensors"


def _layers_of(file: Path) -> list[int] | None:
    """What a file says of its columns; `samples` finds one that is absent or cannot be read."""
    from safetensors import SafetensorError

    from vllm.hidden_states_storage import stored_layer_ids

    try:
        return stored_layer_ids(file)
    except (FileNotFoundError, SafetensorError):
        return None


@dataclass
class RoundCounts:
    """As the server's metrics count: `drafts` are rounds that verified at least one token, and
    `per_position[i]` those in which the first i + 1 were accepted."""

    depth: int
    drafts: int = 0
    draft_tokens: int = 0
    per_position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.per_position = [0] * self.depth

    def add(self, num_drafts: int, accepted: int) -> None:
        """One round."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        for position in range(accepted):
            self.per_position[position] += 1

    @property
    def rates(self) -> list[float]:
        """Share of the rounds in which the draft at each position was accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.per_position]

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens per round, with the one after the accepted ones."""
        return 1 + sum(self.rates)


def replies(loss_mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and past-the-last index of each run of ones; what has no token before it begins one
    later, as a reply follows a prompt."""
    start: int | None = None
    for index, mask in enumerate([*loss_mask, 0]):
        if mask and start is None:
            start = max(index, 1)
        if not mask and start is not None:
            if index > start:
                yield start, index
            start = None


def count_rounds(
    counts: RoundCounts, token_ids: Sequence[int], drafts: Sequence[Sequence[int]], reply: range
) -> None:
    """Add the rounds that make the tokens `reply`, of which the first comes from the prompt.

    `drafts[t]` follow the token at t + 1. Nothing is drafted past the reply's last token but one:
    the one after it is what the last round adds.
    """
    newest = reply.start
    while (room := reply.stop - 1 - newest) > 0:
        offered = drafts[newest - 1][: min(counts.depth, room)]
        accepted = 0
        for draft, token in zip(offered, token_ids[newest + 1 :], strict=False):
            if draft != token:
                break
            accepted += 1
        counts.add(len(offered), accepted)
        newest += accepted + 1
