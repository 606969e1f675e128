# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoint tensors, and the one error that lists what does not fit."""

import pytest
import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.models.tied_head import EMBEDDING, TiedHead
from vllm.model_executor.models.weights import AutoWeightsLoader, WeightsError, WeightsMapper

FUSED = (("gate_up", "gate", 0), ("gate_up", "up", 1))


class Toy(nn.Module):
    """One fused layer and one plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate_up = MergedColumnParallelLinear(3, [2, 2], bias=False)
        self.norm = nn.Parameter(torch.zeros(3))


def tensors() -> dict[str, Tensor]:
    return {
        "mlp.gate.weight": torch.ones(2, 3),
        "mlp.up.weight": torch.full((2, 3), 2.0),
        "norm": torch.full((3,), 3.0),
    }


def load(model: nn.Module, weights: dict[str, Tensor], **options: object) -> set[str]:
    return AutoWeightsLoader(model, fused=FUSED, **options).load_weights(weights.items())


def test_fused_and_plain_names() -> None:
    model = Toy()
    assert load(model, tensors()) == {"mlp.gate_up.weight", "norm"}
    assert model.mlp.gate_up.weight.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert model.norm.tolist() == [3.0] * 3


def test_already_fused_checkpoint() -> None:
    model, weights = Toy(), tensors()
    fused = torch.cat([weights.pop("mlp.gate.weight"), weights.pop("mlp.up.weight")])
    load(model, {**weights, "mlp.gate_up.weight": fused})
    assert torch.equal(model.mlp.gate_up.weight, fused)


def test_every_problem_in_one_error() -> None:
    weights = tensors()
    del weights["mlp.up.weight"]
    weights["norm"] = torch.zeros(4)
    weights["extra.weight"] = torch.zeros(1)
    with pytest.raises(WeightsError) as caught:
        load(Toy(), weights)
    assert caught.value.problems == (
        "mis-shaped: norm: expected shape [3], found [4]",
        "surplus: extra.weight [1]",
        "missing: mlp.up.weight",
    )


@pytest.mark.parametrize("whole_first", [True, False])
def test_one_of_two_tensors_for_a_part_is_surplus(whole_first: bool) -> None:
    """The later one was used: of a layer fused and in parts, and of two names for one parameter."""
    whole = {"mlp.gate_up.weight": torch.zeros(4, 3)}
    weights = {**whole, **tensors()} if whole_first else {**tensors(), **whole}
    with pytest.raises(WeightsError) as caught:
        load(Toy(), weights)
    surplus = {"mlp.gate.weight", "mlp.up.weight"} if whole_first else {"mlp.gate_up.weight"}
    assert {one.split()[1] for one in caught.value.problems} == surplus
    assert all(one.startswith("surplus: ") for one in caught.value.problems)
    loader = AutoWeightsLoader(Toy(), fused=FUSED)
    mapper = WeightsMapper(orig_to_new_prefix={"final_norm": "norm"})
    with pytest.raises(WeightsError, match=r"1 problem\(s\)\s+surplus: norm \[3\] beside norm"):
        loader.load_weights({**tensors(), "final_norm": torch.zeros(3)}.items(), mapper=mapper)


def test_long_lists_are_cut() -> None:
    surplus = {f"extra.{i}": torch.zeros(1) for i in range(30)}
    with pytest.raises(WeightsError, match=r"30 problem\(s\)[^$]*extra\.19[^$]*and 10 more") as e:
        load(Toy(), {**tensors(), **surplus})
    assert "extra.20" not in str(e.value) and len(e.value.problems) == 30


def test_skipped_tensors_are_a_decision() -> None:
    decisions.clear()
    extra = {"vision.a": torch.zeros(1), "vision.b": torch.zeros(1)}
    load(Toy(), {**tensors(), **extra}, skip_prefixes={"vision.": "text only", "audio.": "text"})
    records = {d.what: (d.chosen, d.why) for d in decisions.decisions()}
    assert records == {"checkpoint tensors vision.*": ("2 not loaded", "text only")}


def test_rotary_buffers_of_older_checkpoints_are_a_decision() -> None:
    decisions.clear()
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    assert load(Toy(), {**tensors(), **buffer}) == {"mlp.gate_up.weight", "norm"}
    (record,) = decisions.decisions()
    assert (record.what, record.chosen) == (
        "checkpoint tensors *.rotary_emb.inv_freq",
        "not loaded",
    )


@pytest.mark.parametrize("name", ["lm_head.weight", "other.weight"])
@pytest.mark.parametrize("head", [torch.ones(3, 2).half(), torch.zeros(3, 2), torch.ones(4, 2)])
def test_a_tied_head_is_the_embedding(name: str, head: Tensor) -> None:
    """Else nothing says which of the two the checkpoint means."""
    tied, passed = TiedHead(torch.ones(3, 2)), [(EMBEDDING, torch.ones(3, 2)), (name, head)]
    assert list(tied.placed(passed)) == passed
    if name == "other.weight" or (head.shape == (3, 2) and bool(head.all())):
        tied.check()
    else:
        with pytest.raises(WeightsError, match='"tie_word_embeddings": false'):
            tied.check()


def test_a_tied_head_alone_is_the_embedding() -> None:
    head, other = torch.ones(3, 2), torch.zeros(1)
    tied = TiedHead(torch.zeros(3, 2))
    assert list(tied.placed([("lm_head.weight", head), ("a", other)])) == [
        ("a", other),
        (EMBEDDING, head),
    ]
    tied.check()


def test_dtype_is_converted() -> None:
    model = Toy().to(torch.bfloat16)
    load(model, {k: v.half() for k, v in tensors().items()})
    assert model.norm.dtype == torch.bfloat16 and model.norm.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.w", "model.layers.0.w"),
        ("model.norm.w", "model.norm.w"),
        ("a.old.b", "a.new.b"),
        ("x.gamma", "x.weight"),
        ("vision.x", None),
        ("a.rotary.b", None),
        ("a.inv_freq", None),
    ],
)
def test_mapper(name: str, expected: str | None) -> None:
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "model.", "vision.": None},
        orig_to_new_substr={".old.": ".new.", ".rotary.": None},
        orig_to_new_suffix={".gamma": ".weight", ".inv_freq": None},
    )
    assert mapper.map_name(name) == expected
    mapped = [n for n, _ in mapper.apply([(name, torch.zeros(1))])]
    assert mapped == ([] if expected is None else [expected])
