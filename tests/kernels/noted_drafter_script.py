# SPDX-License-Identifier: Apache-2.0
"""Notes the kernels of an engine with a drafter, as one of several ranks has them, and prints their
names (JSON).

What no kernel writes is as far out of range as can be, so nothing may follow from it.
"""

import json
import sys

import torch

from tests.kernels import no_gpu  # noqa: F401
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import as_first_rank_of, without_communication
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.cuda import CudaKernels
from vllm.platforms import current_platform
from vllm.v1.worker import warm_up
from vllm.v1.worker.worker import Worker

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
json.dump([one.kernel for one in noted], sys.stdout)
