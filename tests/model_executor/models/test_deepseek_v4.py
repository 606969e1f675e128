# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 checkpoints: every spelling of names and config, every form of weights, and what is
refused. What the model computes is compared in tests/parity."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import quantise
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, tiny_model
from torch import Tensor, nn

from tests.model_executor.harness import get_model, make_config
from tests.model_executor.layers.test_mixture_layer import dequantised
from tests.tiny_configs import deepseek_v4_fields
from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.kernels.fp8 import GROUP
from vllm.model_executor.layers.moe import mixtures_of
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.fp8_experts import Fp8ExpertsMethod
from vllm.model_executor.layers.quantization.registry import make_quantization_config
from vllm.model_executor.layers.quantization.unquantized import UnquantizedExpertsMethod
from vllm.model_executor.models.deepseek_v4 import NAMES, compress_ratio, mixture_shape
from vllm.model_executor.models.weights import WeightsError

pytestmark = pytest.mark.parity
FAMILY = "deepseek_v4"
Tensors = dict[str, Tensor]

#: transformers' way to save it -> the release's
_RELEASE = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)


def saved() -> Tensors:
    return load_file(tiny_model(FAMILY) / "model.safetensors")


def released() -> Tensors:
    """Under the release's names."""
    found = {}
    for name, tensor in saved().items():
        for pattern, other in _RELEASE:
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def of_modules() -> Tensors:
    """Under the names of transformers' modules, experts stacked."""
    state = hf_model(tiny_model(FAMILY)).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if "inv_freq" not in name}


def write(path: Path, tensors: Tensors, **fields: Any) -> Path:
    """A checkpoint of these tensors with a config as it is released, and `fields`."""
    shutil.copytree(tiny_model(FAMILY), path)
    config = deepseek_v4_fields() | {"model_type": FAMILY, "torch_dtype": "float32"}
    config |= {"architectures": ["DeepseekV4ForCausalLM"], **fields}
    (path / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(path: Path) -> nn.Module:
    return get_model(make_config(path))


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, param in theirs.items():
        assert torch.equal(ours[name], param), name


@pytest.mark.parametrize("tensors", [released, of_modules], ids=lambda f: f.__name__)
def test_all_names_give_the_same_weights(tensors: Callable[[], Tensors], tmp_path: Path) -> None:
    """Also those that transformers saves with its own spelling of the config."""
    expected = load(tiny_model(FAMILY))
    assert_same(load(write(tmp_path / "other", tensors())), expected)
    first = dict(expected.named_parameters())
    assert torch.equal(
        first["model.layers.2.attn.kv_norm.weight"], saved()["model.layers.2.attn.norm.weight"]
    )


def test_transformers_reads_what_it_saved(tmp_path: Path) -> None:
    """A round trip through its names changes nothing."""
    hf_model(tiny_model(FAMILY)).save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == saved().keys()
    assert_same(load(write(tmp_path / "again", again)), load(tiny_model(FAMILY)))


def test_the_spellings_of_the_config_say_the_same() -> None:
    old = json.loads(json.dumps(deepseek_v4_fields()))
    new = json.loads((tiny_model(FAMILY) / "config.json").read_text())
    assert "compress_ratios" in old and "num_hash_layers" in old and "rope_scaling" in old
    assert not {"compress_ratios", "num_hash_layers", "rope_scaling"} & new.keys()
    assert [compress_ratio(_config(**old), i) for i in range(5)] == old["compress_ratios"][:5]
    assert [mixture_shape(_config(**old), i).hashed_vocab for i in range(5)] == [260] * 2 + [0] * 3


def test_names_of_this_model_stay() -> None:
    """They go through the mapper again when they are loaded."""
    for name, _ in load(tiny_model(FAMILY)).named_parameters():
        assert NAMES.map_name(name) == name
    for name in saved():
        mapped = NAMES.map_name(name)
        assert mapped is not None and NAMES.map_name(mapped) == mapped
    assert NAMES.map_name("layers.0.attn.wo_a.scale") == "model.layers.0.attn.wo_a.weight_scale_inv"
    assert NAMES.map_name("model.layers.0.ffn_hc.scale") == "model.layers.0.hc_ffn.scale"


def test_what_predicts_further_tokens_is_not_loaded(tmp_path: Path) -> None:
    extra = {"mtp.0.e_proj.weight": torch.zeros(64, 64), "mtp.0.enorm.weight": torch.zeros(64)}
    decisions.clear()
    assert_same(load(write(tmp_path / "mtp", released() | extra)), load(tiny_model(FAMILY)))
    (found,) = [one for one in decisions.decisions() if "mtp." in one.what]
    assert found.chosen == "2 not loaded"


# ---- quantised -----------------------------------------------------------------------------------


def power_of_two_scales(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 weights under e8m0 scales by block, and what they stand for."""
    parts, _ = quantise(tensor, "block")
    scale = parts["weight_scale_inv"].float().log2().ceil().exp2()
    rows, columns = tensor.shape
    wide = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:rows, :columns]
    values = (tensor / wide).to(torch.float8_e4m3fn)
    return values, scale.to(torch.float8_e8m0fnu), values.float() * wide


def packed(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two e2m1 per int8 along the columns under e8m0 scales, and what they stand for."""
    runs = tensor.unflatten(-1, (-1, mxfp4.RUN))
    scale = (runs.abs().amax(-1) / 6).log2().ceil().clamp(min=-20)
    table = torch.tensor(mxfp4._MAGNITUDES)
    magnitudes = (runs / scale.exp2()[..., None]).abs()
    codes = (magnitudes[..., None] - table).abs().argmin(-1) + 8 * (runs < 0)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    exponents = (scale + 127).to(torch.uint8)
    signed = torch.where(codes < 8, 1.0, -1.0) * table[codes % 8]
    values = (signed * scale.exp2()[..., None]).flatten(-2)
    weights = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
    return weights, exponents.view(torch.float8_e8m0fnu), values


Quantise = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
_KEPT = ("compressor", "weights_proj", "gate.", "norm", "embed", "head")


def quantised(experts: Quantise, others: Quantise = power_of_two_scales) -> tuple[Tensors, Tensors]:
    """The release's tensors, quantised, and what they stand for."""
    stored, plain = {}, {}
    for name, tensor in released().items():
        linear = tensor.dim() == 2 and name.endswith(".weight")
        if not linear or any(part in name for part in _KEPT):
            stored[name] = plain[name] = tensor
            continue
        weight, scale, plain[name] = (experts if ".experts." in name else others)(tensor)
        stored |= {name: weight, name.removesuffix("weight") + "scale": scale}
    return stored, plain


def float_scales(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By block, in fp32, as the base model's experts are."""
    parts, plain = quantise(tensor, "block")
    return parts["weight"], parts["weight_scale_inv"], plain


def stored_as(scale_fmt: str | None = "ue8m0", **fields: Any) -> dict[str, Any]:
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
    }
    if scale_fmt is not None:
        quantization["scale_fmt"] = scale_fmt
    return {"quantization_config": quantization, **fields}


def weights_of(model: nn.Module) -> Tensors:
    """All of them, without quantisation; the shared experts' are their own."""
    found: Tensors = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        scale = params.get(f"{name}_scale_inv")
        if "_scale" in name:
            continue
        if scale is None:
            found[name] = param.float() if param.is_floating_point() else param
        else:
            stacked = (t if t.dim() == 3 else t[None] for t in (param, scale))
            found[name] = dequantised(*stacked).view(param.shape)
    for mixture in mixtures_of(model):
        prefix, count = mixture.layer_name, mixture.shape.num_experts
        gate_up = found.pop(f"{prefix}.experts.gate_up_proj")
        down = found.pop(f"{prefix}.experts.down_proj")
        found |= {f"{prefix}.gate_up": gate_up[:count], f"{prefix}.down": down[:count]}
        if mixture.shape.stacks_shared and mixture.shared_expert is None:
            found |= {
                f"{prefix}.shared_expert.gate_up_proj.weight": gate_up[count],
                f"{prefix}.shared_expert.down_proj.weight": down[count],
            }
    return found


@pytest.mark.parametrize(
    ("experts", "expert_dtype"), [(packed, "fp4"), (float_scales, "fp8")], ids=["fp4", "fp8"]
)
def test_quantised_checkpoints_are_what_they_stand_for(
    experts: Quantise, expert_dtype: str, tmp_path: Path
) -> None:
    """Weights exactly; the choices that were made are recorded."""
    stored, plain = quantised(experts)
    decisions.clear()
    config = make_config(write(tmp_path / "stored", stored, **stored_as(expert_dtype=expert_dtype)))
    model = get_model(config)
    made = [*config.decisions.decisions(), *decisions.decisions()]
    records = {each.what: each.chosen for each in made}
    found, expected = weights_of(model), weights_of(load(write(tmp_path / "plain", plain)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0, msg=name)
    assert records["scales of float8 activations"] == "the largest value over 448"
    assert records["float8 weights of wo_a"] == "made float32 while they load"
    unpacked = "made float32 while they load" if expert_dtype == "fp4" else None
    assert records.get("mxfp4 experts") == unpacked


def test_a_packed_checkpoint_needs_its_scales(tmp_path: Path) -> None:
    stored, _ = quantised(packed)
    name = "layers.1.ffn.experts.3.w2"
    short = stored | {f"{name}.scale": stored[f"{name}.scale"][:, :0]}
    fields = stored_as(expert_dtype="fp4")
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj\.weight_scale_inv: expected"):
        load(write(tmp_path / "short", short, **fields))
    missing = {key: value for key, value in stored.items() if key != f"{name}.scale"}
    with pytest.raises(WeightsError, match=r"missing: .*experts\.3\.down_proj\.weight_scale_inv"):
        load(write(tmp_path / "missing", missing, **fields))
    alone = {key: value for key, value in stored.items() if key != f"{name}.weight"}
    with pytest.raises(WeightsError, match=r"surplus: .*experts\.3\.down_proj\.weight_scale_inv"):
        load(write(tmp_path / "alone", alone, **fields))


def test_what_a_checkpoint_keeps_has_its_names(tmp_path: Path) -> None:
    """Of a module that it calls otherwise."""
    stored, plain = quantised(float_scales)
    kept = "layers.1.ffn.shared_experts"
    for name in list(stored):
        if name.startswith(f"{kept}.") or name.startswith("layers.1.attn.wq_a."):
            stored.pop(name)
            stored |= {name: plain[name]} if name in plain else {}
    fields = stored_as(expert_dtype="fp8")
    names = [kept, "model.layers.1.self_attn.q_a_proj"]
    fields["quantization_config"]["modules_to_not_convert"] = names
    params = dict(load(write(tmp_path / "kept", stored, **fields)).named_parameters())
    assert params["model.layers.1.attn.wq_a.weight"].dtype == torch.float32
    assert params["model.layers.1.ffn.shared_expert.down_proj.weight"].dtype == torch.float32
    assert params["model.layers.1.attn.wq_b.weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("beside", ["fp4", "fp8"])
def test_element_types_may_stand_beside_the_rest(beside: str, tmp_path: Path) -> None:
    """Where the release has them, and transformers before 5.23 leaves them."""
    fields = stored_as(expert_dtype=beside)
    model = make_config(write(tmp_path / "beside", released(), **fields)).model_config
    config = model.hf_config
    rest = {k: v for k, v in config.quantization_config.items() if k != "expert_dtype"}
    config.quantization_config = rest
    assert config.expert_dtype == beside
    quantization = make_quantization_config(model)
    assert quantization is not None
    method = quantization.get_experts_method("model.layers.0.ffn.experts")
    made = UnquantizedExpertsMethod if beside == "fp4" else Fp8ExpertsMethod
    assert isinstance(method, made)


def test_other_element_types_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "other", released(), **stored_as(expert_dtype="int4"))
    with pytest.raises(VLLMValidationError, match="expert_dtype 'int4'; supported: fp8, fp4"):
        make_config(path)


# ---- configs -------------------------------------------------------------------------------------


def _config(**fields: Any) -> Any:
    return type(hf_model(tiny_model(FAMILY)).config)(**{**deepseek_v4_fields(), **fields})


@pytest.mark.parametrize(
    ("fields", "of", "message"),
    [
        ({"compress_rate_csa": 8}, compress_ratio, "compressed_sparse_attention at 8 is not"),
        ({"scoring_func": "sigmoid"}, mixture_shape, "'sigmoid' with norm_topk_prob True"),
        ({"norm_topk_prob": False}, mixture_shape, "'sqrtsoftplus' with norm_topk_prob False"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], of: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(_config(**fields), 2)
