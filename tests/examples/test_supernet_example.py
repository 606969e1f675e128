# SPDX-License-Identifier: Apache-2.0
"""The supernet in miniature: its training model is Apriel2, and its frontier is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import placements
import pytest
import torch
import train_demo_model
from safetensors.torch import load_file
from supernet_model import Sizes, Supernet

from tests.apriel2_models import Reference, save, thinned
from tests.e2e.remote_server import RemoteServer
from vllm.v1.core.decode_cost import DEVICES

pytestmark = pytest.mark.slow

SMALL = Sizes(vocab=64, context=64, hidden=32, mlp=48, layers=4, heads=4, head_dim=16, window=5)


@pytest.mark.parametrize("names", [["attention", "gdn", "kda", "sliding_window"], ["kda"] * 4])
def test_the_trained_model_computes_apriel2s_equations(names: list[str], tmp_path: Path) -> None:
    """Over two chunks and a half; the tensors of its checkpoint, by their names."""
    torch.manual_seed(0)
    model = Supernet(SMALL)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    model.save_pretrained(tmp_path)
    decoder = json.loads((tmp_path / "config.json").read_text())["decoder"]
    tensors = load_file(tmp_path / "model.safetensors")
    ids = torch.randint(64, (40,))
    with torch.no_grad():
        found = model.logits(ids[None], names)[0]
    expected = Reference(decoder, tensors, names).logits(ids.tolist())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-4)


def test_every_mixer_is_trained() -> None:
    """A step draws one for each layer, and a placement is drawn again after few steps."""
    model = Supernet(SMALL)
    ids = torch.randint(64, (1, 20))
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        if all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()):
            break
    else:
        raise AssertionError("a mixer was never drawn")
    with torch.no_grad():
        assert model(ids, labels=ids).loss == model(ids, labels=ids).loss


@pytest.mark.e2e
def test_trained_served_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "supernet"
    monkeypatch.setattr(
        train_demo_model, "Sizes", lambda vocab, context, *_: Sizes(vocab, context, 64)
    )
    text = Path(placements.__file__).read_text()
    corpus = train_demo_model.Corpus([text] * 2, [text])
    monkeypatch.setattr(train_demo_model, "collect", lambda repo: corpus)
    flags = ["--steps", "2", "--batch", "1", "--context", "256"]
    command = ["train", "--supernet", "--output", str(path), "--vocab-size", "300", *flags]
    monkeypatch.setattr(sys, "argv", command)
    train_demo_model.main()
    assert json.loads((path / "training.json").read_text())["held_out_perplexity"] > 1
    aliases = ["swa=all-swa", "gdn=all-gdn", "kda=all-kda"]
    flags = ["--dtype", "float32", "--placement-alias", *aliases]
    with RemoteServer(path, *flags) as server:
        drawn = tmp_path / "frontier.png"
        quick = ["--placements", "6", "--texts", "2", "--tokens", "4", "--repeats", "1"]
        quick += ["--device", "1e10,1e12"]
        monkeypatch.setattr(
            sys, "argv", ["placements", "--url", server.url, "--output", str(drawn), *quick]
        )
        placements.main()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    found = json.loads(drawn.with_suffix(".json").read_text())
    assert len(found["measured"]) == 6 and len({one["loss"] for one in found["measured"]}) == 6
    # A window of 64 tokens reads less than all of up to 256; on any device.
    predicted = {one["placement"]: one["predicted_ms"] for one in found["measured"]}
    uniform = {name: predicted[",".join([name] * 4)] for name in ("attention", "sliding_window")}
    assert 0 < uniform["sliding_window"] < uniform["attention"]
    assert all(one["step_ms"] > 0 for one in found["measured"])
    assert set(found["frontier"]) <= {one["placement"] for one in found["measured"]}
    assert "nats" in capsys.readouterr().out


def test_layers_of_a_thinned_supernet_have_choices_of_their_own(tmp_path: Path) -> None:
    outline = placements.Outline(str(save(tmp_path, thinned(), {})))
    chosen = outline.choose(None)
    assert chosen == ["attention,gdn,_", "attention,kda,_", "gdn,gdn,_", "gdn,kda,_"]
    names = [placements.uniform_name(one) for one in chosen]
    assert names == [None, None, "all-gdn", None]
    assert outline.choose(1) == ["gdn,gdn,_"] and len(set(outline.choose(3))) == 3
    seconds = [outline.seconds(one, DEVICES["H200"], 4, 100) for one in chosen]
    assert len(set(seconds)) == 4 and min(seconds) > 0


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [("a", 1.0, 1.0), ("b", 2.0, 3.0), ("c", 2.5, 2.0), ("d", 1.5, 2.0), ("e", 2.0, 2.5)]
    best = placements.frontier([placements.Measured(*point) for point in points])
    assert [one.placement for one in best] == ["b", "d", "a"]
