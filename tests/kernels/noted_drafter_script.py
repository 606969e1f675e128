# SPDX-License-Identifier: Apache-2.0
"""Notes the kernels of an engine with a drafter, as one of several ranks has them, and prints their
names (JSON): those that warm-up foresees, and those of further steps, each of which verifies
another number of drafts than the next.

What no kernel writes is as far out of range as can be, so nothing may follow from it.
"""

import json
import sys
from itertools import permutations

import torch

from tests.kernels import no_gpu  # noqa: F401
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import as_first_rank_of, without_communication
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.compile_ahead import Variant, noted_launches
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker import warm_up
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.worker import Worker

NAMES, LENGTH = ["a", "b", "c"], 40


def changing_widths(runner: ModelRunner) -> list[Variant]:
    """What is launched by decodes of each width before each other one."""
    warm_up.bind_small_arena(runner)
    blocks = tuple([0] * table.spec.blocks_for(LENGTH + 8) for table in runner.block_tables.groups)
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    # The host knows all tokens: what was sampled is whatever was in memory.
    new = [
        NewRequestData(name, [1] * LENGTH, [], greedy, None, blocks, LENGTH - 1) for name in NAMES
    ]
    cached = CachedRequestData(
        req_ids=NAMES,
        new_block_ids=[None] * len(NAMES),
        num_computed_tokens=[LENGTH] * len(NAMES),
        num_output_tokens=[1] * len(NAMES),
    )
    steps = [(new, CachedRequestData.make_empty(), 1, runner.width)]
    steps += [([], cached, *pair) for pair in permutations(runner.widths, 2)]
    with noted_launches() as noted, without_communication():
        for fresh, known, width, following in steps:
            step = SchedulerOutput(
                fresh,
                known,
                dict.fromkeys(NAMES, width),
                width * len(NAMES),
                sampling_req_ids=set(NAMES),
                num_next_drafts=following - 1,
            )
            runner.execute_dummy(step, launches=False)
    return noted


# Uninitialised integers are the largest there are.
torch.use_deterministic_algorithms(True)
vars(current_platform)["kernels"] = CudaKernels()
target, settings = sys.argv[1], json.loads(sys.argv[2])
config = EngineArgs(
    model=target, dtype="bfloat16", max_model_len=512, max_num_seqs=4, speculative_config=settings
).create_engine_config()
worker = Worker(config)
worker.init_device()
ranks = as_first_rank_of(int(sys.argv[3]))
with ranks, without_communication(), set_current_vllm_config(config):
    worker.load_model()
    noted = warm_up.note_kernels(worker.model_runner)
    known = {(one.kernel, one.specialization) for one in noted}
    further = [
        one.kernel
        for one in changing_widths(worker.model_runner)
        if (one.kernel, one.specialization) not in known
    ]
json.dump({"foreseen": [one.kernel for one in noted], "further": further}, sys.stdout)
