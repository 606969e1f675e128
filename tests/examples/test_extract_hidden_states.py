# SPDX-License-Identifier: Apache-2.0
"""The drafter dataset: killed and continued, checked, compared, and read by speculators."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import datasets
import extract_hidden_states
import pytest
import torch
from drafter_dataset import DrafterDataset, Settings, problem_in
from example_process import TRAINED, assert_gone, children, run, start, wait_for
from extraction_engines import extraction_config
from safetensors.torch import load_file, save_file
from training_text import Sample

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import hf_residual_streams
from vllm.hidden_states_storage import RowFormat

pytestmark = [pytest.mark.slow, pytest.mark.extraction]

SAMPLES = 60
LAYERS = [2, 4, 5, 8]
HIDDEN = 256
MEMORY = 64 << 20
RELATIVE_ERROR = 1e-4
MADE_UP = Settings("m", "server", None, 2, 3, [])


def flags(path: Path, in_flight: int = 8, samples: int = SAMPLES) -> list[str]:
    return [
        *("--output", str(path), "--samples", str(samples), "--seq-length", "192"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", str(MEMORY)),
        *("--in-flight", str(in_flight)),
    ]


def finished(path: Path) -> dict[str, int]:
    """Names of the samples' files, with the times they were written."""
    files = (path / "hidden_states").glob("hs_*.safetensors")
    return {file.name: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its first samples, and then continued."""
    path = tmp_path_factory.mktemp("drafter") / "dataset"
    process = start("extract_hidden_states", *flags(path, in_flight=1))
    wait_for(lambda: len(finished(path)) >= 3, process)
    engine = children(process)
    process.kill()
    process.communicate()
    assert_gone(engine)
    before = finished(path)
    assert 3 <= len(before) < SAMPLES, "the run was over: the test shows nothing"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert extract_hidden_states.main(["--output", str(path), "--verify"]) == 1
    assert f"{SAMPLES - len(before)} bad or missing" in said.getvalue()
    continued = run("extract_hidden_states", *flags(path))
    assert continued.returncode == 0, continued.stderr
    assert f"{len(before)} of {SAMPLES} samples are there" in continued.stdout
    assert f"{SAMPLES - len(before)} samples, " in continued.stdout
    after = finished(path)
    assert {name: after[name] for name in before} == before, "finished samples were redone"
    assert len(after) == SAMPLES
    return path


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def test_nothing_is_left_behind(dataset: Path) -> None:
    assert not (dataset / "hidden_states" / ".staging").exists()
    assert len(list((dataset / "hidden_states").iterdir())) == SAMPLES


def test_finished_dataset_starts_no_engine(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extract_hidden_states, "engine_for", None)
    assert extract_hidden_states.main(flags(dataset)) == 0
    assert f"{SAMPLES} of {SAMPLES} samples are there" in capsys.readouterr().out


def test_rows_are_the_residual_streams(dataset: Path) -> None:
    samples = DrafterDataset(dataset)
    for index in (0, 7, SAMPLES - 1):
        token_ids = samples.token_ids(index)
        rows = load_file(samples.file_of(index))["hidden_states"]
        assert rows.shape == (len(token_ids), len(LAYERS), HIDDEN)
        streams = hf_residual_streams(TRAINED, token_ids)
        for column, layer in enumerate(LAYERS):
            error = (rows[:, column] - streams[layer]).norm() / streams[layer].norm()
            assert error < RELATIVE_ERROR, f"sample {index}, layer {layer}: {error:.1e}"


def test_speculators_reads_it(dataset: Path) -> None:
    data = pytest.importorskip("speculators.train.data")
    samples = data.ArrowDataset(max_len=256, datapath=str(dataset), on_missing="raise")
    assert len(samples) == SAMPLES
    ours = DrafterDataset(dataset)
    for index, length in enumerate(samples.approx_lengths):
        item = samples[index]
        assert item["input_ids"].tolist() == ours.token_ids(index)
        assert item["hidden_states"].shape == (length, (len(LAYERS) - 1) * HIDDEN)
        assert item["verifier_last_hidden_states"].shape == (length, HIDDEN)
        assert item["loss_mask"].tolist() == [1] * length
    batch = data.CollateFn(256, HIDDEN, len(LAYERS) - 1, torch.float32)([samples[0]])
    assert batch["hidden_states"].shape == (1, 256, (len(LAYERS) - 1) * HIDDEN)
    train = data.ArrowDataset(256, str(dataset), train_ratio=0.9, on_missing="raise")
    held = data.ArrowDataset(256, str(dataset), train_ratio=0.9, split="val", on_missing="raise")
    assert (len(train), len(held)) == (SAMPLES * 9 // 10, SAMPLES // 10)
    assert held[0]["input_ids"].tolist() == ours.token_ids(SAMPLES * 9 // 10)


def test_speculators_counts_tokens_alike(dataset: Path, tmp_path: Path) -> None:
    mapping = pytest.importorskip("speculators.train.vocab_mapping")
    rows = pytest.importorskip("datasets").load_from_disk(str(dataset))
    mapping.save_token_frequency_distribution(rows, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert torch.load(dataset / "token_freq.pt", weights_only=True) == theirs


def test_good_dataset_is_verified(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert extract_hidden_states.main(["--output", str(dataset), "--verify"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert f"{SAMPLES} of {SAMPLES} samples are good, 0 bad or missing" in line


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_row(file: Path) -> None:
    tensors = load_file(file)
    save_file({**tensors, "hidden_states": tensors["hidden_states"][:-1].clone()}, file)


def lose_a_value(file: Path) -> None:
    tensors = load_file(file)
    tensors["hidden_states"][3, 1, 5] = float("nan")
    save_file(tensors, file)


def swap_tokens(file: Path) -> None:
    tensors = load_file(file)
    tensors["token_ids"] = tensors["token_ids"].flip(0)
    save_file(tensors, file)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (truncate, "cannot be opened"),
        (lose_a_row, "rows of shape"),
        (lose_a_value, "not finite"),
        (swap_tokens, "token ids differ"),
        (Path.unlink, "missing"),
    ],
)
def test_damage_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str], damage: object, reason: str
) -> None:
    assert callable(damage)
    file = copy / "hidden_states" / "hs_4.safetensors"
    damage(file)
    assert extract_hidden_states.main(["--output", str(copy), "--verify"]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err and reason in captured.err
    [line] = captured.out.splitlines()
    assert f"{SAMPLES - 1} of {SAMPLES} samples are good, 1 bad or missing" in line


def test_rows_in_eight_bits_are_checked_alike(copy: Path) -> None:
    """As a server with `storage_dtype` stores them."""
    file = copy / "hidden_states" / "hs_4.safetensors"
    tensors = load_file(file)
    rows = tensors.pop("hidden_states")
    row_format = RowFormat(*rows.shape[1:], rows.dtype, "fp8_e4m3")
    stored = row_format.store(rows)
    save_file({**tensors, **stored.tensors}, file, row_format.metadata)
    dataset = DrafterDataset(copy)
    ids = dataset.token_ids(4)
    assert dataset.is_finished(4) and problem_in(file, ids, LAYERS) is None
    assert stored.scales is not None
    stored.scales[3, 1] = float("nan")
    save_file({**tensors, **stored.tensors}, file, row_format.metadata)
    assert problem_in(file, ids, LAYERS) == "values are not finite"


def test_truncated_file_is_made_again(copy: Path, dataset: Path) -> None:
    truncate(copy / "hidden_states" / "hs_4.safetensors")
    assert extract_hidden_states.main(flags(copy)) == 0
    name = "hidden_states/hs_4.safetensors"
    again, first = load_file(copy / name), load_file(dataset / name)
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changed, reason",
    [
        (["--seq-length", "100"], "was started with seq_length 192, not 100"),
        (["--layers", "2", "8"], r"was started with layers \[2, 4, 5, 8\]"),
        (["--layers", "2", "4"], "the number of layers"),
        (["--layers", "4", "2", "8"], "must ascend"),
    ],
)
def test_settings_that_do_not_fit(dataset: Path, changed: list[str], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        extract_hidden_states.main([*flags(dataset), *changed])


def test_interrupt_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    # Far more samples than it could finish before the signal arrives.
    process = start("extract_hidden_states", *flags(path, in_flight=1, samples=3000))
    wait_for(lambda: len(finished(path)) >= 1, process)
    engine = children(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "the same command continues from here" in err and "Traceback" not in err
    assert_gone(engine)
    assert not (path / "hidden_states" / ".staging").exists()


def test_two_runs_do_not_share_a_directory(copy: Path) -> None:
    with DrafterDataset(copy).writing():
        with pytest.raises(SystemExit, match="another run is writing"):
            extract_hidden_states.main(flags(copy))


def prepared(path: Path, settings: Settings = MADE_UP) -> DrafterDataset:
    """A dataset of three samples whose hidden states are missing."""
    dataset = DrafterDataset(path)
    samples = [Sample([10 * n + 1, 10 * n + 2], [1, 1]) for n in range(3)]
    dataset.prepare(settings, samples)
    (path / "hidden_states").mkdir(exist_ok=True)
    return dataset


def test_samples_are_written_as_they_come(tmp_path: Path) -> None:
    """Millions of them are more than memory holds."""
    made: list[weakref.ref[Sample]] = []
    most = 0

    def samples() -> Iterator[Sample]:
        nonlocal most
        for n in range(600):
            sample = Sample([n, n + 1, 7], [0, n % 2, 1])
            made.append(weakref.ref(sample))
            most = max(most, sum(one() is not None for one in made))
            yield sample

    dataset = DrafterDataset(tmp_path)
    dataset.prepare(MADE_UP, samples())
    assert most < 5 and len(dataset) == 600 and dataset.token_ids(599) == [599, 600, 7]
    read = datasets.load_from_disk(tmp_path)
    assert read[3]["loss_mask"].tolist() == [0, 1, 1] and read["seq_len"][:].tolist() == [3] * 600
    counts = torch.load(tmp_path / "token_freq.pt")
    assert counts[7] == 600 and counts[8] == 1 and 9 not in counts
    assert {file.name for file in tmp_path.iterdir()} == {
        "data-00000-of-00001.arrow", "state.json", "dataset_info.json", "token_freq.pt",
        "extraction.json",
    }  # fmt: skip


def stored(path: Path, token_ids: list[int], columns: int = 3) -> Path:
    rows = {"hidden_states": torch.ones(2, columns, 4), "token_ids": torch.tensor(token_ids)}
    save_file(rows, path)
    return path


def test_a_file_of_other_tokens_is_not_finished(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    stored(dataset.file_of(0), [1, 2])
    stored(dataset.file_of(1), [1, 2])
    assert [dataset.is_finished(n) for n in range(3)] == [True, False, False]


def test_rows_of_another_form_do_not_join(tmp_path: Path) -> None:
    """As of a server that was started again with other layers, which this side is not told."""
    dataset = prepared(tmp_path)
    stored(dataset.file_of(0), [1, 2])
    assert dataset.is_finished(0)
    other = stored(tmp_path / "other", [11, 12], columns=2)
    reason = "2 columns of 4 F32, while other samples have 3 columns of 4 F32"
    with pytest.raises(SystemExit, match=reason):
        dataset.adopt(1, other)
    other.rename(dataset.file_of(1))
    again = DrafterDataset(tmp_path)
    assert [again.is_finished(n) for n in range(3)] == [True, False, False]
    assert [problem for _, problem in again.problems()] == [None, reason, "missing"]


def test_a_full_disk_leaves_no_half_of_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            prepared(tmp_path)
    assert not DrafterDataset(tmp_path).is_prepared
    assert len(prepared(tmp_path)) == 3


def test_weights_that_changed_do_not_continue(tmp_path: Path) -> None:
    """A model trained further under its old name: one dataset would have rows of two models."""
    model = tmp_path / "model"
    shutil.copytree(TRAINED, model)
    arguments = [*flags(tmp_path / "data"), "--model", str(model)]
    settings = extract_hidden_states.settings_of(extract_hidden_states.parse_arguments(arguments))
    dataset = prepared(tmp_path / "data", settings)
    stored(dataset.file_of(0), [1, 2])
    dataset.check_settings(settings)
    [file] = model.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit, match="was started with weights"):
        extract_hidden_states.main(arguments)


def test_text_without_rows_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed before its first sample may be put right, its settings too."""
    prepared(tmp_path)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(extract_hidden_states, "engine_for", fails)
    with pytest.raises(SystemExit, match="error: .*No space left on device"):
        extract_hidden_states.main(flags(tmp_path, samples=2))
    assert len(DrafterDataset(tmp_path)) == 2


def test_what_a_server_captured_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"collect_capture.py makes a dataset"):
        extract_hidden_states.main(flags(tmp_path))


def test_verify_needs_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a dataset"):
        extract_hidden_states.main(["--output", str(tmp_path), "--verify"])


@pytest.mark.e2e
def test_with_a_server(tmp_path: Path) -> None:
    """Rows with masks, through a running server; the same rows as transformers'."""
    rows = [
        {"input_ids": list(range(10 * n, 10 * n + 40)), "loss_mask": [0] * 30 + [1] * 10}
        for n in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = extraction_config([1, 8], tmp_path / "server")
    server_flags = ["--dtype", "float32", "--max-model-len", "256"]
    for name, value in config.items():
        server_flags += ["--" + name.replace("_", "-"), json.dumps(value)]
    output = tmp_path / "dataset"
    with RemoteServer(TRAINED, *server_flags) as server:
        arguments = ["--output", str(output), "--server", server.url, str(tmp_path / "rows.jsonl")]
        assert extract_hidden_states.main(arguments) == 0
    assert not list((tmp_path / "server").iterdir()), "files or locks were left to the server"
    samples = DrafterDataset(output)
    assert sorted(map(samples.token_ids, range(5))) == [row["input_ids"] for row in rows]
    masks = datasets.load_from_disk(str(output)).with_format(None)["loss_mask"]
    assert list(masks) == [row["loss_mask"] for row in rows]
    assert all(problem is None for _, problem in samples.problems())
    streams = hf_residual_streams(TRAINED, samples.token_ids(2))
    found = load_file(samples.file_of(2))["hidden_states"]
    expected = torch.stack([streams[1], streams[8]], dim=1)
    assert (found - expected).norm() / expected.norm() < RELATIVE_ERROR


@pytest.mark.e2e
def test_server_without_extraction(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def read_lines(path):\n    return open(path)\n" * 4)
    with RemoteServer(TRAINED, "--max-model-len", "1024") as server:
        arguments = ["--output", str(tmp_path / "dataset"), "--server", server.url]
        with pytest.raises(SystemExit, match="answered without hidden states"):
            extract_hidden_states.main([*arguments, str(tmp_path / "text.txt")])
    with pytest.raises(SystemExit, match="no answer from"):
        extract_hidden_states.main([*arguments, str(tmp_path / "text.txt")])
