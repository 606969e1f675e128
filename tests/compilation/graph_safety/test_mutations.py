# SPDX-License-Identifier: Apache-2.0
"""Hazards put into the tree's own functions are found where they are: the pass reaches them."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import tiny_model

import vllm
from vllm.compilation.graph_safety import sources
from vllm.compilation.graph_safety.targets import check_model
from vllm.engine.arg_utils import EngineArgs

ROOT = Path(inspect.getfile(vllm)).parent
#: file, a statement of it, what is put behind it on its line, the hazard
MUTATIONS = [
    ("model_executor/layers/gated_delta_net.py", "heads = self.num_v_heads", "b.max().item()", 1),
    ("kernels/moe/triton.py", "tokens, slots = experts.shape", "experts.flatten().bincount()", 2),
    ("v1/sample/sampler.py", "chosen = token_ids.clamp(min=0)", "assert (chosen > 0).all()", 5),
    (
        "v1/attention/backends/paged.py",
        "prefills = slice(decodes.stop, m.num_tokens)",
        "m.seq_lens.tolist()",
        1,
    ),
]


@pytest.fixture
def reread() -> Iterator[None]:
    """Sources are read from `linecache`, before and after."""
    caches = (sources.parsed, sources._definitions, sources.rebound_names, sources.imported_names)
    for cache in caches:
        cache.cache_clear()
    yield
    linecache.clearcache()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("reread")
def test_mutations_of_the_tree_are_found() -> None:
    expected = set()
    for name, statement, hazard, number in MUTATIONS:
        path = str(ROOT / name)
        lines = linecache.getlines(path)
        at = next(i for i, line in enumerate(lines) if line.strip() == statement)
        lines[at] = f"{lines[at].rstrip()}; {hazard}\n"
        text = "".join(lines)
        linecache.cache[path] = (len(text), None, lines, path)
        expected.add((path, at + 1, number))
    config = EngineArgs(model=str(tiny_model("qwen3_5_moe"))).create_engine_config()
    report = check_model(config)
    assert {(f.path, f.line, f.hazard) for f in report.findings} == expected
