# SPDX-License-Identifier: Apache-2.0
"""Nothing of the registries is left out: each model, mixer, drafter and connector is checked by a
test of this folder, or it says here why not."""

from __future__ import annotations

import json

import pytest
import quantized_models
from tiny_models import FAMILIES, tiny_model

from tests.compilation.graph_safety import test_model_steps, test_served_forms, test_tree
from vllm.compilation.graph_safety.report import Report, as_table
from vllm.compilation.graph_safety.targets import check_connector, check_model
from vllm.config import KVTransferConfig
from vllm.config.draft_methods import DRAFT_METHODS
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import registry
from vllm.model_executor.models.apriel2_mixers import MIXERS
from vllm.model_executor.models.registry import ModelRegistry

pytestmark = pytest.mark.slow

#: architectures that are no family of tiny models, and the test whose steps they run in
ELSEWHERE = {
    "Apriel2ForCausalLM": test_model_steps.test_mixers,
    "ExtractHiddenStatesModel": test_model_steps.test_hidden_states,
}
#: another architecture's class, under another name
SAME_CLASS = {"Apriel2ForConditionalGeneration": "Apriel2ForCausalLM"}
#: what a connector does within a step though it may not, by function, and why it is let be
WAITS = {
    "ExampleConnector": (
        "an example to read, not to serve with: it writes files before a step ends",
        {
            ("ExampleConnector._block_index", 7),
            ("ExampleConnector.wait_for_save", 1),
            ("PrefixStore.save", 3),
            ("digests", 1),
            ("digests", 3),
            ("compare_digests", 5),
        },
    )
}


def test_every_architecture_is_checked() -> None:
    families: dict[str, set[str]] = {}
    for family in FAMILIES:
        config = json.loads((tiny_model(family) / "config.json").read_text())
        for name in config["architectures"]:
            families.setdefault(name, set()).add(family)
    checked = set(families) | set(ELSEWHERE) | set(SAME_CLASS)
    assert checked == ModelRegistry.get_supported_archs(), (
        "give the architecture a tiny configuration in CONFIGS of tests/tiny_configs.py, or name "
        "it in ELSEWHERE here, with the test that runs its steps"
    )
    for name, other in SAME_CLASS.items():
        assert ModelRegistry.load_model_cls(name) is ModelRegistry.load_model_cls(other)
    by_source = {*test_tree.OTHERS, *test_tree.PARTS_OF_OTHERS}
    by_steps = {*test_model_steps.FAMILIES, *test_model_steps.ALIKE}
    assert by_source == by_steps == set(FAMILIES)
    # Of each architecture one family does not wait for the night.
    assert all(own & set(test_model_steps.FAMILIES) for own in families.values())


def test_every_mixer_is_checked() -> None:
    layouts = test_model_steps.LAYOUTS.values()
    descriptions = test_model_steps.MIXERS | test_model_steps.MAMBA
    kinds = {descriptions[name]["type"] for names in layouts for name in names}
    assert {MIXERS[kind] for kind in kinds} == set(MIXERS.values())


def test_every_quantisation_is_checked() -> None:
    forms = [form for _, form in [*test_served_forms.STORED, *test_served_forms.MORE]]
    stored = {quantized_models._CONFIGS[form]["quant_method"] for form in forms}
    assert set(forms) == set(quantized_models._CONFIGS) and stored == set(registry._STORED)
    assert set(test_served_forms.AT_LOAD) == set(registry._AT_LOAD)
    assert set(test_served_forms.MADE_16_BIT) == set(registry._MADE_16_BIT)


def test_every_mixer_is_part_of_a_placement() -> None:
    assert set(test_served_forms.MIXED.split(",")) == set(test_model_steps.MIXERS)


def test_every_drafter_is_checked() -> None:
    assert {made.__name__.removeprefix("_") for made in test_model_steps.DRAFTERS} == set(
        DRAFT_METHODS
    )


def _connectors() -> list[str]:
    """Names whose class ships with the engine. One that cannot be imported is an error."""
    found = []
    for name in KVConnectorFactory._registry:
        try:
            KVConnectorFactory.get_connector_class_by_name(name)
        except ImportError as error:
            if "does not ship" not in str(error):
                raise
        else:
            found.append(name)
    return found


def _places(report: Report) -> set[tuple[str, int]]:
    return {
        (
            ".".join(part for part in finding.function.split(".")[-2:] if part != "seal"),
            finding.hazard,
        )
        for finding in report.findings
    }


@pytest.mark.parametrize("name", _connectors())
def test_no_connector_has_a_hazard(name: str) -> None:
    cls = KVConnectorFactory.get_connector_class_by_name(name)
    report = check_connector(cls)
    assert any(function.endswith(".start_load_kv") for function in report.functions)
    _, expected = WAITS.get(name, ("", set()))
    assert _places(report) == expected, "\n" + as_table([report])


def test_connectors_that_wait_are_there() -> None:
    assert set(WAITS) <= set(_connectors())


def test_the_configured_connector_is_part_of_a_model() -> None:
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": "/nowhere"},
    )
    args = EngineArgs(model=str(tiny_model("llama")), kv_transfer_config=transfer)
    report = check_model(args.create_engine_config())
    assert _places(report) == WAITS["ExampleConnector"][1]
