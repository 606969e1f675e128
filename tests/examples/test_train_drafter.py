# SPDX-License-Identifier: Apache-2.0
"""The loop from extraction to a served drafter, at its smallest."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import train_drafter
from drafter_dataset import DrafterDataset
from drafter_serving import Measured, prompts_of
from example_process import TRAINED
from own_outputs import cut, files_of
from python_library import library_root
from transformers import AutoTokenizer

from vllm.entrypoints.cli.main import main

pytestmark = pytest.mark.slow

# Its import takes seconds: the tests that use it do that.
if find_spec("speculators") is None:
    pytest.skip("speculators is not installed", allow_module_level=True)

PROMPT, OUTPUT, DEPTH, DRAFTS = 12, 40, 2, 3
LAYERS = [0, 4, 7, 8]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measured]:
    """Where everything is, and what the server measured. `ast.py` is held out."""
    path = tmp_path_factory.mktemp("loop") / "out"
    files = [str(library_root() / name) for name in ("argparse.py", "ast.py")]
    sizes = ["--samples", "10", "--held-out", "4", "--epochs", "4", "--depth", str(DEPTH)]
    sizes += ["--drafts", str(DRAFTS)]
    tokens = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]
    flags = ["--batch-tokens", "64", "--memory-bytes", str(48 << 20), "--learning-rate", "3e-3"]
    arguments = ["--output", str(path), *sizes, *tokens, *flags, *files]
    return path, train_drafter.run(train_drafter.parse_arguments(arguments))


@pytest.mark.e2e
def test_the_datasets_are_what_the_model_says(loop: tuple[Path, Measured]) -> None:
    path, _ = loop
    for name, count, learnt in (("data", 10, 1), ("held_out", 4, 0)):
        dataset = DrafterDataset(path / name)
        assert len(dataset) == count
        assert all(problem is None for _, problem in dataset.problems())
        assert json.loads((path / name / "extraction.json").read_text())["layers"] == LAYERS
        assert {len(dataset.token_ids(i)) for i in range(count)} == {PROMPT + OUTPUT - 1}
        assert dataset.loss_mask(0) == [learnt] * PROMPT + [1] * (OUTPUT - 1)


@pytest.mark.e2e
def test_drafts_are_accepted_and_change_nothing(loop: tuple[Path, Measured]) -> None:
    path, measured = loop
    assert measured.same_texts == measured.texts == 4
    assert len(measured.rates) == DRAFTS
    assert measured.length == pytest.approx(1 + sum(measured.rates))
    # A drafter that learnt nothing has one token of 2,048 right.
    assert measured.rates[0] > 0.05
    stored = json.loads((path / "acceptance.json").read_text())
    assert (stored["layers"], stored["length"]) == (LAYERS, measured.length)
    assert stored["predicted_length"] == pytest.approx(measured.length, rel=0.03)
    assert f"acceptance length {measured.length:.2f}" in measured.table()
    assert f"{measured.loops:.0%} of the tokens are in loops" in measured.table()


@pytest.mark.e2e
def test_what_was_predicted_is_what_serving_measured(
    loop: tuple[Path, Measured], tmp_path: Path
) -> None:
    """Within 3 % (docs/drafters.md)."""
    path, measured = loop
    inputs = ["--drafter", str(path / "drafter"), "--dataset", str(path / "held_out")]
    output = ["--output-json", str(tmp_path / "predicted.json")]
    assert main(["bench", "acceptance", "--model", str(TRAINED), *inputs, *output]) == 0
    predicted = json.loads((tmp_path / "predicted.json").read_text())
    length = predicted["spec_decode_acceptance_length"]
    assert length == pytest.approx(measured.length, rel=0.03)
    rates = predicted["spec_decode_per_position_acceptance_rates"]
    assert rates == pytest.approx(measured.rates, abs=0.03)


@pytest.mark.e2e
def test_the_checkpoint_says_what_it_was_trained_on(loop: tuple[Path, Measured]) -> None:
    config = json.loads((loop[0] / "drafter" / "config.json").read_text())
    assert config["trained_on"]["layers"] == LAYERS
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYERS[:-1]
    assert not (loop[0] / "checkpoints").exists()


@pytest.mark.e2e
def test_prompts_end_where_the_loss_mask_begins(loop: tuple[Path, Measured]) -> None:
    samples = list(prompts_of(loop[0] / "held_out"))
    assert [(len(prompt), len(said)) for prompt, said in samples] == [(PROMPT, OUTPUT - 1)] * 4


def test_a_drafter_reads_the_embeddings_the_middle_and_the_end() -> None:
    assert train_drafter.input_layers(str(TRAINED)) == LAYERS


def test_a_dataset_without_layers_is_refused(tmp_path: Path) -> None:
    from drafter_training import Recipe, train

    (tmp_path / "extraction.json").write_text(json.dumps({"layers": None}))
    recipe = Recipe(str(TRAINED), 2, 2, 1, 1e-3, 64, 0)
    with pytest.raises(SystemExit, match="does not state its layers; extract it with --layers"):
        train(tmp_path, tmp_path / "work", tmp_path / "drafter", recipe)


def test_held_out_files_are_no_training_files() -> None:
    inputs = [library_root() / name for name in ("argparse.py", "ast.py")]
    assert [path.name for path in files_of(inputs, held_out=True)] == ["ast.py"]
    assert [path.name for path in files_of(inputs, held_out=False)] == ["argparse.py"]
    with pytest.raises(SystemExit, match="no held-out .py file"):
        files_of(inputs[:1], held_out=True)


def test_prompts_are_cut_anywhere_and_the_same_every_time() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    files = [library_root() / name for name in ("ast.py", "this.py")]
    once, again = (cut(files, tokenizer, 16) for _ in range(2))
    prompts = [next(once) for _ in range(6)]
    assert prompts == [next(again) for _ in range(6)]
    assert {len(prompt) for prompt in prompts} == {16} and len(set(map(tuple, prompts))) == 6
    with pytest.raises(SystemExit, match="no file has 1000000 tokens"):
        next(cut(files, tokenizer, 1_000_000))


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--samples", "9"], "--samples must be at least 10"),
        (["--batch-tokens", "100"], "--batch-tokens must hold a sample"),
        (["--model", "/no/dir"], "--model /no/dir: no checkpoint is there"),
    ],
)
def test_arguments_that_cannot_work(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_drafter.parse_arguments(["--output", str(tmp_path / "out"), *flags])
    assert reason in capsys.readouterr().err


def test_a_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(SystemExit):
        train_drafter.parse_arguments(["--output", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
