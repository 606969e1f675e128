# SPDX-License-Identifier: Apache-2.0
"""Which kernel variants warm-up foresees for tiny models, and which other batches would add.

Steps run on CPU tensors with every kernel launch noted and none made. Prints JSON:
what was found for each of the checkpoints that are given, by path. Models have two layers, and one
more of each other kind: further ones launch what those do. With `--thorough` they have all, and
there is a sequence of every length after every context.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.kernels import no_gpu  # noqa: F401
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.compile_ahead import noted_launches
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.worker import warm_up
from vllm.v1.worker.warm_up import DummyBatch
from vllm.v1.worker.worker import Worker

MAX_TOKENS, MAX_LEN = 4000, 4096
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
LENGTHS = (
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65, 100, 500, 1000, 2500, 3071, 3072, 4000,
)  # fmt: skip
CONTEXTS = (0, 1, 7, 16, 100, 2000, 3000)
#: each length after two of the contexts, each context after six lengths or seven
SOME = [
    (1, length, CONTEXTS[(index + more) % len(CONTEXTS)])
    for index, length in enumerate(LENGTHS)
    for more in (0, 3)
]
MANY = [
    *product((2, 3, 8, 31, 60), (1,), (5, 16, 77, 3000)),
    *product((2, 3, 17, 40), (2, 9, 16, 25), (0, 50)),
]


def with_a_layer_of_each_kind(hf_config: Any) -> Any:
    """The configuration with its first layer of each kind, two at least."""
    names = [name for name in ("layer_types", "mlp_layer_types") if hasattr(hf_config, name)]
    kinds = list(zip(*(getattr(hf_config, name) for name in names), strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds}) if len(set(kinds)) > 1 else [0, 1]
    for name in names:
        setattr(hf_config, name, [getattr(hf_config, name)[layer] for layer in kept])
    hf_config.num_hidden_layers = len(kept)
    return hf_config


def noted_by(runner: Any, batches: Sequence[DummyBatch]) -> set[tuple[str, str]]:
    """The kernels that steps of `batches` launch, with what they are compiled for."""
    with noted_launches() as noted:
        for batch in batches:
            warm_up.run_batch(runner, batch, decode_known_tokens=True)
    return {(one.kernel, one.specialization) for one in noted}


def sweep(model: str, batches: Sequence[tuple[int, int, int]], all_layers: bool) -> dict[str, Any]:
    """The kernels that warm-up foresees, and the `batches` (sequences, tokens of each, context)
    that need others."""
    config = EngineArgs(
        model=model,
        dtype="bfloat16",
        load_format="dummy",
        hf_overrides={} if all_layers else with_a_layer_of_each_kind,
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=MAX_TOKENS,
    ).create_engine_config()
    config.cache_config.splits_scans = True
    worker = Worker(config)
    worker.init_device()
    worker.load_model()
    runner = worker.model_runner
    unforeseen: list[str] = []
    with set_current_vllm_config(config):
        foreseen = warm_up.note_kernels(runner)
        known = {(one.kernel, one.specialization) for one in foreseen}
        warm_up.bind_small_arena(runner)
        dummies = [
            DummyBatch(count, length, context, GREEDY)
            for count, length, context in batches
            if count * length <= MAX_TOKENS and length + context < MAX_LEN
        ]
        # Which batch it was is asked only where there is one.
        if not noted_by(runner, dummies) <= known:
            for dummy in dummies:
                new = noted_by(runner, [dummy]) - known
                known |= new
                size = f"{dummy.count} x {dummy.length} after {dummy.context}"
                unforeseen += [f"{kernel} for {size}" for kernel, _ in sorted(new)]
    return {
        "foreseen": [one.kernel for one in foreseen],
        "batches": len(batches),
        "unforeseen": unforeseen,
    }


vars(current_platform)["kernels"] = CudaKernels()
models = [word for word in sys.argv[1:] if word != "--thorough"]
thorough = [*product((1,), LENGTHS, CONTEXTS), *MANY]
is_thorough = "--thorough" in sys.argv
batches = thorough if is_thorough else SOME + MANY
found = {model: sweep(model, batches, all_layers=is_thorough) for model in models}
json.dump(found, sys.stdout)
