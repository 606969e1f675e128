# SPDX-License-Identifier: Apache-2.0
"""Config classes come without model classes, which can be imported all the same afterwards."""

from __future__ import annotations

import subprocess
import sys

from tiny_models import tiny_model

SCRIPT = """
import sys
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.lean_import import without_model_classes
config = get_config(sys.argv[1])
heavy = [m for m in ("transformers.models.auto.modeling_auto",) if m in sys.modules]
refused = False
with without_model_classes():
    try:
        import transformers.models.auto.modeling_auto
    except ImportError:
        refused = True
from transformers import AutoModelForCausalLM
there = "llama" in str(AutoModelForCausalLM._model_mapping.keys())
print(type(config).__module__, heavy, refused, there)
"""


def test_a_config_is_read_without_the_models() -> None:
    """They are an import error inside the block, and there afterwards."""
    command = [sys.executable, "-c", SCRIPT, str(tiny_model("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    module, *rest = done.stdout.splitlines()[-1].split()
    assert module == "transformers.models.llama.configuration_llama"
    assert rest == ["[]", "True", "True"]


def test_what_is_imported_already_stays() -> None:
    from transformers import AutoModelForCausalLM

    from vllm.transformers_utils.lean_import import without_model_classes

    assert AutoModelForCausalLM.__name__
    with without_model_classes():
        from transformers.models.auto import modeling_auto

        assert sys.modules[modeling_auto.__name__] is modeling_auto
    assert sys.modules[modeling_auto.__name__] is modeling_auto
