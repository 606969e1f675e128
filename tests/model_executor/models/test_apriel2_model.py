# SPDX-License-Identifier: Apache-2.0
"""Apriel2: logits of every mixer and mixture against the equations in fp64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apriel2_models import (
    MAMBA,
    MIXERS,
    Description,
    Reference,
    block,
    fixed,
    inverse_frequencies,
    make_tensors,
    pattern,
    save,
    stochastic,
    thinned,
)

from tests.model_executor.harness import Chunk, Harness, make_config, naive_kernels
from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import attention_factor
from vllm.model_executor.layers.rotary_embedding import inverse_frequencies as our_frequencies
from vllm.model_executor.model_loader import base
from vllm.model_executor.models.apriel2_mixers import rope_parameters

LAYOUTS = {
    **{name: [name] * 2 for name in MIXERS},
    "mixture": ["attention", "gdn", "kda", "sliding_window"],
    "mambas": ["mamba", "mamba_after"],
}


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def checkpoint(path: Path, names: list[str], **fields: Any) -> tuple[Path, Reference]:
    decoder = pattern(names, MIXERS | MAMBA)
    tensors = make_tensors(decoder)
    return save(path, decoder, tensors, **fields), Reference(decoder, tensors)


def assert_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, float(error)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def model(request, tmp_path_factory) -> tuple[Path, Reference]:
    return checkpoint(tmp_path_factory.mktemp("apriel2"), LAYOUTS[request.param])


# ---- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 70, 130])
def test_logits_of_every_mixer_are_those_of_the_equations(model, length):
    """Prompts of one token, within one window, and past one and two chunks of 64."""
    path, reference = model
    found = Harness(path).logits([Chunk(0, 0, ids(length))])
    assert_logits(found, reference.logits(ids(length)))


def test_chunks_and_decodes_agree_with_one_pass(model):
    """A prompt in uneven chunks, its first of one token, beside another one's decodes."""
    path, reference = model
    harness, a, b = Harness(path), ids(80, 1), ids(60, 2)
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    found["b"].append(harness.logits([Chunk(1, 0, b[:40])]))
    cuts = [0, 1, 18, 19, 60, 77, 78, 79, 80]
    for step, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        other = Chunk(1, 40 + step, [b[40 + step]])
        chunk = Chunk(0, start, a[start:end])
        logits = harness.logits([other, chunk])
        found["b"].append(logits[:1])
        found["a"].append(logits[1:])
    assert_logits(torch.cat(found["a"]), reference.logits(a))
    assert_logits(torch.cat(found["b"]), reference.logits(b)[: 40 + len(cuts) - 1])


def test_a_first_chunk_of_one_token_reads_no_state(model):
    """Of a block that another sequence has used: it starts from zero although it is as long as a
    decode."""
    path, reference = model
    harness, used, tokens = Harness(path), ids(30, 3), ids(9, 4)
    harness.logits([Chunk(0, 0, used)])
    first = harness.logits([Chunk(0, 0, tokens[:1])])
    rest = harness.logits([Chunk(0, 1, tokens[1:])])
    assert_logits(torch.cat([first, rest]), reference.logits(tokens))


def test_prefills_have_more_tokens_than_there_are_states(model):
    """None is cut off: the number of states bounds sequences, not tokens."""
    path, reference = model
    found = Harness(path, num_seqs=1).logits([Chunk(0, 0, ids(200))])
    assert_logits(found, reference.logits(ids(200)))


def test_reference_kernels_agree_too(model):
    path, reference = model
    with naive_kernels():
        assert_logits(Harness(path).logits([Chunk(0, 0, ids(20))]), reference.logits(ids(20)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_are_the_residual_streams(layout, tmp_path):
    path, reference = checkpoint(tmp_path, LAYOUTS[layout])
    layers = (0, len(LAYOUTS[layout]) // 2, len(LAYOUTS[layout]))
    harness = Harness(path)
    harness.model.set_aux_hidden_state_layers(layers)
    _, aux = harness.step([Chunk(0, 0, ids(20))])
    streams = reference.streams(ids(20))
    for layer, found in zip(layers, aux, strict=True):
        assert_logits(found, streams[layer])


# ---- formats -------------------------------------------------------------------------------------


def test_a_pattern_repeats_and_ties(tmp_path):
    decoder = pattern(["gdn", "attention"]) | {"num_blocks": 3}
    tensors = make_tensors(decoder, tied=True)
    path = save(tmp_path, decoder, tensors)
    found = Harness(path).logits([Chunk(0, 0, ids(20))])
    assert_logits(found, Reference(decoder, tensors).logits(ids(20)))


@pytest.mark.parametrize(
    "rotary",
    [
        {
            "type": "llama3",
            "theta": 500.0,
            "scale_factor": 8.0,
            "low_frequency_factor": 1.0,
            "high_frequency_factor": 4.0,
            "original_context_length": 64,
        },
        {
            "type": "yarn",
            "theta": 500.0,
            "scale_factor": 4.0,
            "attention_factor": None,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "original_context_length": 64,
        },
        {
            "type": "yarn",
            "theta": 500.0,
            "scale_factor": 4.0,
            "attention_factor": 1.4,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "original_context_length": 64,
        },
    ],
    ids=["llama3", "yarn", "yarn with a factor"],
)
def test_scaled_rotations(rotary, tmp_path):
    decoder = fixed(MIXERS["attention"] | {"rotary": rotary}, 2)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    found = Harness(path).logits([Chunk(0, 0, ids(100))])
    assert_logits(found, Reference(decoder, tensors).logits(ids(100)))
    plain = Reference(fixed(MIXERS["attention"], 2), tensors).logits(ids(100))
    assert (found.double() - plain).abs().max() > 0.1
    ours = rope_parameters({"rotary": rotary}, "")
    frequencies, temperature = inverse_frequencies(rotary, 16)
    torch.testing.assert_close(our_frequencies(16, ours).double(), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(temperature)


def assert_built(decoder: Description, path: Path, *placements: list[str]) -> None:
    """Logits are those of the equations, of each placement."""
    tensors = make_tensors(decoder)
    save(path, decoder, tensors)
    for placement in placements or [None]:
        config = make_config(path)
        config.model_config.placement = placement
        found = Harness(path, config=config).logits([Chunk(0, 0, ids(20))])
        assert_logits(found, Reference(decoder, tensors, placement).logits(ids(20)))


OFF, ON = ({"bias": {"enabled": enabled}} for enabled in (False, True))


@pytest.mark.parametrize(
    "biases",
    [
        {"add_linear_biases": True},
        {"key_layer": ON},
        {"add_linear_biases": True, "value_layer": OFF},
        {"query_layer": ON, "key_layer": ON, "value_layer": ON, "dense_layer": OFF},
    ],
    ids=["all", "of keys alone", "all but of values", "all but of outputs"],
)
def test_biases_of_attention(biases, tmp_path):
    decoder = fixed(MIXERS["attention"] | biases, 1)
    assert any(name.endswith("proj.bias") for name in make_tensors(decoder))
    assert_built(decoder, tmp_path)


def test_kimi_delta_attention_that_says_nothing_of_its_norm(tmp_path):
    mixer = {key: value for key, value in MIXERS["kda"].items() if key != "normalization"}
    assert_built(fixed(mixer, 1), tmp_path)


def test_a_supernet_with_mamba(tmp_path):
    decoder = stochastic(3, MIXERS | MAMBA)
    assert_built(decoder, tmp_path, ["mamba", "attention", "mamba_after"], ["gdn", "mamba", "kda"])


def test_a_thinned_supernet(tmp_path):
    assert_built(thinned(), tmp_path, ["gdn", "kda", ""], ["attention", "gdn", "_"])
    model = Harness(tmp_path).model
    assert model.get_layer_placements() == {0: "gdn", 1: "kda"}
    assert model.get_layer_mixers() == {0: ("attention", "gdn"), 1: ("gdn", "kda")}
    assert model.get_mixer_names() == ("attention", "gdn", "kda")
    assert model.spell("all-gdn") == "gdn,gdn,_"
    with pytest.raises(VLLMValidationError, match="layer 0 has no mixer 'kda'; it has attention"):
        model.set_layer_placements("all-kda")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gates_of_kimi_delta_attention(activation, tmp_path):
    norm = {"epsilon": 1e-3, "activation": activation}
    decoder = fixed(MIXERS["kda"] | {"normalization": norm}, 1)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    found = Harness(path).logits([Chunk(0, 0, ids(20))])
    assert_logits(found, Reference(decoder, tensors).logits(ids(20)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_stay_fp32_whatever_the_checkpoint_has(dtype, tmp_path):
    decoder = pattern(["gdn", "kda"])
    tensors = make_tensors(decoder)
    rounded = {
        name: tensor.bfloat16().float() if name.endswith(("A_log", "dt_bias")) else tensor
        for name, tensor in tensors.items()
    }
    stored = {
        name: tensor.to(dtype) if name.endswith(("A_log", "dt_bias")) else tensor
        for name, tensor in rounded.items()
    }
    harness = Harness(save(tmp_path, decoder, stored))
    for name, param in harness.model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            assert param.dtype is torch.float32
    found = harness.logits([Chunk(0, 0, ids(20))])
    assert_logits(found, Reference(decoder, rounded).logits(ids(20)))


def test_multimodal_checkpoints_are_served_as_text(tmp_path, monkeypatch):
    decoder = fixed(MIXERS["gdn"], 1)
    tensors = make_tensors(decoder)
    vision = {"model.vision_encoder.adapter.linear_1.weight": torch.zeros(4, 4)}
    fields = {
        "model_type": "apriel2",
        "architectures": ["Apriel2ForConditionalGeneration"],
        "vision_encoder": {"hidden_size": 4},
        "image_token_index": 3,
    }
    path = save(tmp_path, decoder, tensors | vision, **fields)
    decisions.clear()
    read = count_bytes_read(monkeypatch)
    found = Harness(path).logits([Chunk(0, 0, ids(20))])
    assert read.keys() == tensors.keys()
    assert_logits(found, Reference(decoder, tensors).logits(ids(20)))
    recorded = {one.what: one.chosen for one in decisions.decisions()}
    assert recorded["checkpoint tensors model.vision_encoder.*"] == "1 not loaded"


def count_bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By name, of what loaders read from files from here on."""
    read: dict[str, int] = {}
    iterate = base.safetensors_weights_iterator

    def counted(*given: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterate(*given):
            read[name] = tensor.nbytes
            yield name, tensor

    monkeypatch.setattr(base, "safetensors_weights_iterator", counted)
    return read


# ---- surgery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [["gdn", "attention", "sliding_window", "kda"], ["kda"] * 4, ["attention"] * 4]
)
def test_a_pattern_takes_its_mixers_from_a_supernet(names, tmp_path, monkeypatch):
    supernet = stochastic(4)
    tensors = make_tensors(supernet)
    path = save(tmp_path, pattern(names), tensors)
    decisions.clear()
    read = count_bytes_read(monkeypatch)
    harness = Harness(path)
    found = harness.logits([Chunk(0, 0, ids(40))])
    assert_logits(found, Reference(supernet, tensors, names).logits(ids(40)))
    assert not [name for name, _ in harness.model.named_parameters() if "mixers" in name]
    chosen = {f"blocks.{layer}.mixer.mixers.{name}." for layer, name in enumerate(names)}
    used = {
        key: tensor.nbytes
        for key, tensor in tensors.items()
        if ".mixers." not in key or any(prefix in key for prefix in chosen)
    }
    assert read == used
    unused = len(tensors) - len(used)
    recorded = {one.what: one.chosen for one in decisions.decisions()}
    assert recorded["checkpoint tensors unselected_mixers.*"] == f"{unused} not loaded"


def test_a_pattern_thins_a_supernet(tmp_path):
    """Its blocks have some of the checkpoint's mixers to choose from; the others stay on disk."""
    supernet = stochastic(2)
    tensors = make_tensors(supernet)
    some = {name: MIXERS[name] for name in ("kda", "gdn")}
    blocks = {"front": stochastic(1, some, "kda")["block"], "gdn": block(MIXERS["gdn"])}
    thin = {"type": "pattern", "num_blocks": 2, "pattern": [*blocks], "blocks": blocks}
    decisions.clear()
    harness = Harness(save(tmp_path, thin, tensors))
    found = harness.logits([Chunk(0, 0, ids(40))])
    assert_logits(found, Reference(supernet, tensors, ["kda", "gdn"]).logits(ids(40)))
    assert [*harness.model.model.layers[0].mixer.mixers] == ["kda", "gdn"]
    kept = ("0.mixer.mixers.kda.", "0.mixer.mixers.gdn.", "1.mixer.mixers.gdn.")
    unused = sum(".mixers." in key and not any(one in key for one in kept) for key in tensors)
    recorded = {one.what: one.chosen for one in decisions.decisions()}
    assert recorded["checkpoint tensors unselected_mixers.*"] == f"{unused} not loaded"


def test_names_are_matched_whole(tmp_path):
    """A mixer whose name begins as another's is another."""
    mixers = {"gdn": MIXERS["gdn"], "gdn_v2": MIXERS["gdn"]}
    supernet = stochastic(2, mixers, main="gdn")
    tensors = make_tensors(supernet)
    path = save(tmp_path, pattern(["gdn_v2", "gdn"], mixers), tensors)
    found = Harness(path).logits([Chunk(0, 0, ids(20))])
    assert_logits(found, Reference(supernet, tensors, ["gdn_v2", "gdn"]).logits(ids(20)))
