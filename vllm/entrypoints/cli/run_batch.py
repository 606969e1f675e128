# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch`: answers a file of OpenAI batch requests without a server."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.dataclass_flags import add_flag, flag_specs, from_namespace
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from vllm.entrypoints.openai.run_batch import BatchCounts

#: flags of the server that have a meaning without a network
_FRONT_END = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_log_outputs",
        "enable_log_requests",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "log_error_stack",
        "max_log_len",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "renderer_num_workers",
        "response_role",
        "return_tokens_as_token_ids",
        "tool_call_parser",
        "tool_parser_plugin",
        "trust_request_chat_template",
    }
)
#: lines in flight per sequence that steps can hold: enough that no step waits for the next line
_LINES_PER_SEQUENCE = 2


class RunBatchCommand(CLISubcommand):
    """Loads the engine, answers the file, and stops."""

    description = "Answer a JSONL file of OpenAI batch requests without a server."

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        batch = parser.add_argument_group("Batch", "The files.")
        batch.add_argument("-i", "--input-file", required=True, help="JSONL file of requests.")
        batch.add_argument("-o", "--output-file", required=True, help="JSONL file of answers.")
        front_end = parser.add_argument_group("Frontend", "How requests are read and answered.")
        for spec in flag_specs(FrontEndArgs):
            if spec.name in _FRONT_END:
                add_flag(front_end, spec)
        AsyncEngineArgs.add_cli_args(parser)

    def run(self, args: argparse.Namespace) -> int:
        source, target = Path(args.input_file), Path(args.output_file)
        if not source.is_file():
            raise VLLMValidationError(f"--input-file {source}: no such file", "input_file")
        if target.exists() and target.samefile(source):
            raise VLLMValidationError("--output-file must not be the input file", "output_file")
        check_file("output_file", target)
        # Nobody but this command sends requests, and it has no key.
        front_end = replace(from_namespace(FrontEndArgs, args), api_key=[])
        counts = asyncio.run(_run(args, front_end, source, target))
        print(f"{counts.lines} requests, {counts.errors} of them with an error: {target}")
        return 0


async def _run(
    args: argparse.Namespace, front_end: FrontEndArgs, source: Path, target: Path
) -> "BatchCounts":
    """Open the output before the engine starts: a bad path must not cost a load."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.run_batch import read_lines, run_batch
    from vllm.entrypoints.utils import most_running
    from vllm.v1.engine.async_llm import AsyncLLM

    total = sum(1 for _ in read_lines(source))
    with target.open("w", encoding="utf-8", buffering=1) as output:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        try:
            app = build_app(engine, front_end)
            most_lines = _LINES_PER_SEQUENCE * most_running(engine.vllm_config)
            async with app.router.lifespan_context(app):
                counts = await run_batch(app, read_lines(source), output, most_lines, total)
            if engine.errored:
                raise engine.dead_error
            return counts
        finally:
            engine.shutdown()
