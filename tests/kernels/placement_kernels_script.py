# SPDX-License-Identifier: Apache-2.0
"""Notes the kernels that a rehearsal of each given placement of a supernet launches, and says
whether warm-up takes it for a new one; prints JSON, a list in the order of the arguments."""

import json
import sys

from tests.kernels import no_gpu  # noqa: F401
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import without_communication
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.compile_ahead import noted_launches
from vllm.platforms import current_platform
from vllm.v1.worker import warm_up
from vllm.v1.worker.worker import Worker

vars(current_platform)["kernels"] = CudaKernels()
config = EngineArgs(
    model=sys.argv[1],
    dtype="bfloat16",
    load_format="dummy",
    max_model_len=512,
    max_num_seqs=2,
    max_num_batched_tokens=8,
).create_engine_config()
worker = Worker(config)
worker.init_device()
worker.load_model()
runner = worker.model_runner
found = []
with set_current_vllm_config(config):
    for placement in sys.argv[2:]:
        runner.supernet().set_layer_placements(placement.split(","))
        runner._collect_layers()
        with noted_launches() as noted, without_communication():
            warm_up.bind_small_arena(runner)
            warm_up._rehearse(runner, decode_known_tokens=True)
        is_new = warm_up.note_placement(runner)
        runner.release_kv_cache()
        kernels = sorted((one.kernel, one.specialization) for one in noted)
        found.append({"new": is_new, "kernels": kernels})
json.dump(found, sys.stdout)
