# SPDX-License-Identifier: Apache-2.0
"""A server of several API processes in front of an engine without a model:
`python -m tests.entrypoints.many_processes FLAGS`. STEP_MS: milliseconds per step; REPLICAS: how
many engine cores; ORPHAN_GRACE_S: how long an API process that has lost its parent may take."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.token_source import TokenExecutor, make_config
from vllm.config import ParallelConfig, VllmConfig
from vllm.entrypoints.api_processes import process
from vllm.entrypoints.api_processes.serve import serve_together
from vllm.entrypoints.cli.main import report_failure
from vllm.entrypoints.listening import bound
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.fork_server import fork_server


class SleepingExecutor(TokenExecutor):
    """Answers what a worker is asked when it goes to sleep; `die` ends the core's process, `pace`
    makes its steps take that many seconds."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._calls: list[str] = []

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method == "die":
            os._exit(9)
        if method == "sleep":
            return [0]
        if method == "pace":
            (self._step_s,) = args
            return [None]
        self._calls.append(str(method))
        return [{"calls": list(self._calls), "pid": os.getpid()}]


def main() -> int:
    parser = FlexibleArgumentParser()
    add_dataclass_flags(parser, FrontEndArgs, "Frontend")
    with tempfile.TemporaryDirectory() as directory:
        try:
            args = FrontEndArgs.from_cli_args(parser.parse_args())
            step_s = float(os.environ.get("STEP_MS", "10")) / 1e3
            config = make_config(Path(directory), max_num_seqs=8, step_s=step_s)
            config.parallel_config = ParallelConfig(
                data_parallel_size=int(os.environ.get("REPLICAS", "1"))
            )
            assert config.model_config is not None
            config.model_config.enable_sleep_mode = True
            process._ORPHAN_GRACE_S = float(
                os.environ.get("ORPHAN_GRACE_S", process._ORPHAN_GRACE_S)
            )
            with fork_server(process.APPLICATION), bound(args, shared=True) as first:
                return serve_together(first, args, config, SleepingExecutor)
        except Exception as error:
            report_failure("serve", error)
            return 1


if __name__ == "__main__":
    sys.exit(main())
