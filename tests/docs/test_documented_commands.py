# SPDX-License-Identifier: Apache-2.0
"""Every command of README, docs and examples works, read from the text itself.

What a command needs in order to be tried in seconds on a CPU is declared here: smaller numbers
appended to it, or why it is not run. A command that no line covers fails the first test.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, Command, commands_of, documented_commands
from tests.forked_python import run_python
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.main import SUBCOMMANDS, find_command
from vllm.entrypoints.cli.main import main as vllm
from vllm.entrypoints.openai.cli_args import FrontEndArgs, make_arg_parser
from vllm.tool_parsers import tool_parsers
from vllm.utils.argparse_utils import FlexibleArgumentParser

pytestmark = pytest.mark.slow

MODEL = str(ROOT / "examples" / "models" / "tiny-qwen3_5-code")
SUPERNET = str(ROOT / "examples" / "models" / "tiny-apriel2-supernet")
#: words of the text that stand for a model
_MODELS = ("MODEL", "$MODEL", "M", "Qwen3.5-4B", "Qwen/Qwen3-8B", "SUPERNET")
#: of a deeper model than the one at hand
_LAYER_IDS = re.compile(r"(layer_ids\": )\[[^\]]*\]")
_SMALL_ENGINE = ["--max-model-len", "256", "--kv-cache-memory-bytes", "64M"]

#: begins a command -> what is appended to try it
SMOKE: dict[str, list[str]] = {
    # with a whole server each: tests/e2e/test_client_storm.py has smaller runs of the first two
    "python -m benchmarks.api_overhead": ["--help"],
    "python -m benchmarks.client_storm": ["--help"],
    "python -m benchmarks.hostile_clients": ["--help"],
    # tests/e2e/test_http_streams.py has smaller runs
    "python -m benchmarks.http_streams": ["--help"],
    # tests/distributed/kv_transfer/test_hidden_states_fp8.py measures a smaller model
    "python -m benchmarks.hidden_states_fp8": ["--help"],
    # starts two servers; tests/benchmarks/test_disaggregation_rows.py has its parts
    "python -m benchmarks.disaggregation": ["--help"],
    # starts a process per rank
    "python -m benchmarks.executor_step": ["--help"],
    "python -m benchmarks.pipeline_stages": ["--help"],
    "python -m benchmarks.all_reduce --ranks 2": ["--kb", "8", "--repeats", "2"],
    # tests/fuzz/test_fuzz.py is a minute of it
    "python -m tests.fuzz": ["--help"],
    "python -m benchmarks.host_step": "--batch 2 --prompt-len 16 --rounds 1 --steps 2".split(),
    "python benchmarks/arena_allocator.py": ["--seconds", "0.01"],
    "python benchmarks/cpu_kernels.py": ["--batch", "1", "--context", "16", "--prompt", "16"]
    + ["--seconds", "0.001", "--experts", "1"],
    "python -m benchmarks.expert_placement": ["--layers", "1"],
    "python docs/generate_cli.py": ["--check"],
    "python examples/": ["--help"],
    "vllm bench latency": ["--batch-size", "2", "--output-len", "4", "--num-iters", "1"]
    + ["--num-iters-warmup", "1", *_SMALL_ENGINE],
    "vllm bench throughput": ["--num-prompts", "2", "--output-len", "4", "--input-len", "16"]
    + _SMALL_ENGINE,
    # an engine per layout: tests/benchmarks/test_scaling.py has two ranks
    "vllm bench scaling MODEL": ["--layouts", "tp1", "--batch-size", "2", "--output-len", "4"]
    + ["--num-iters", "1", *_SMALL_ENGINE],
    "vllm explain MODEL": [],
    "vllm explain SUPERNET": [],
    "vllm explain Qwen3.5-4B": [],
    "vllm explain Qwen3.5-4B --devices": ["--lengths", "1k"],
    # without, 64 steps of the same kinds
    "vllm graph-check MODEL": ["--steps", "4"],
    "vllm tune --list": [],
    "vllm tune MODEL --list": [],
}
#: begins a command -> why it is not run here
ELSEWHERE = {
    "make ": "the steps of CI; its targets are checked below",
    "export ": "sets a variable of the commands after it",
    "vllm bench scaling benchmarks/qwen3_5_27b": "needs several GPUs of 80 GB",
    "vllm bench scaling benchmarks/qwen3_5_35b_a3b": "needs several GPUs of 80 GB",
    "curl ": "tests/e2e/test_documented_server.py",
    "python -m benchmarks.token_source": "runs until it is stopped; tests/e2e/test_client_storm.py",
    "vllm graph-check benchmarks/qwen3_5_4b": "half a minute; a small model is below",
    "vllm graph-check my_model.py": "tests/compilation/graph_safety/test_command.py",
    "vllm graph-check tests/compilation": "tests/compilation/graph_safety/test_planted.py",
    "vllm bench acceptance --": "tests/benchmarks/test_acceptance.py",
    "vllm bench serve --": "tests/e2e/test_documented_server.py",
    "vllm bench startup MODEL": "tests/benchmarks/test_bench_startup.py; its flags: below",
    "vllm proxy --": "tests/e2e/test_disaggregation.py",
    "vllm run-batch": "tests/entrypoints/test_run_batch.py; its flags: below",
    "vllm serve": "its flags and configuration are checked below",
    "lm_eval ": "tests/e2e/test_evaluation_clients.py",
    "guidellm ": "tests/e2e/test_evaluation_clients.py",
    "python benchmarks/cpu_vs_transformers.py": "in a process of its own, below",
    "python -m benchmarks.report": "writes the docs; tests/benchmarks/test_report.py",
    "python -m benchmarks.offline": "needs a GPU",
    "python -m benchmarks.offloading": "needs a GPU",
    "python -m benchmarks.placements": "needs a GPU; tests/benchmarks/test_placement_figures.py",
    "python -m benchmarks.starts": "needs a GPU",
    "python -m benchmarks.process_starts": "minutes; tests/benchmarks/test_process_starts.py",
    "python -m benchmarks.gpu_kernels": "needs a GPU",
    "python -m benchmarks.forced_acceptance": "tests/benchmarks/test_forced_acceptance.py",
    "python -m benchmarks.step_profile": "needs a GPU",
    "python benchmarks/swiglu.py": "needs a GPU",
    "python benchmarks/skinny.py": "needs a GPU",
    "python benchmarks/fp8_linear.py": "needs a GPU",
    "python benchmarks/moe.py": "needs a GPU",
    "python benchmarks/kda.py": "needs a GPU",
    "vllm tune --only": "needs a GPU",
    "vllm tune MODEL": "needs a GPU",
}
COMMANDS = documented_commands()


def covered_by(command: Command, table: dict) -> str | None:
    """The longest beginning of the command in `table`."""
    text = " ".join(command.words)
    return max((key for key in table if text.startswith(key)), key=len, default=None)


def is_mention(command: Command) -> bool:
    """`vllm serve`, `vllm explain --device-memory`, `vllm bench a|b`: names, nothing to run."""
    if re.search("[|<]", " ".join(command.words)):
        return command.words[0] == "vllm"
    name = find_command(list(command.words[1:])) or command.words[1]
    rest = command.words[1 + len(name.split()) :]
    flags_only = all(
        word.startswith("-") or (word.isupper() and word not in _MODELS) for word in rest
    )
    return command.words[0] == "vllm" and flags_only and "--list" not in rest


def stand_in(word: str) -> str:
    """The model that is tried where the text says `word`."""
    return SUPERNET if word == "SUPERNET" else MODEL


def test_every_command_is_declared() -> None:
    unknown = [
        str(command)
        for command in COMMANDS
        if not is_mention(command) and not covered_by(command, SMOKE | ELSEWHERE)
    ]
    assert not unknown
    used = {covered_by(command, SMOKE | ELSEWHERE) for command in COMMANDS}
    used -= {None}
    assert not (SMOKE | ELSEWHERE).keys() - used, "declared, but no longer in the text"


def test_mentions_name_commands_and_flags() -> None:
    for command in filter(is_mention, COMMANDS):
        group = command.words[1]
        assert any(name.split()[0] == group for name in SUBCOMMANDS), str(command)


def arguments(command: Command, tmp_path: Path) -> list[str]:
    """The words to try, without `[optional]` parts, output going to `tmp_path`."""
    words, optional = [], False
    for word in command.words:
        optional = optional or word.startswith("[")
        if not optional:
            words.append(
                stand_in(word) if word in _MODELS else _LAYER_IDS.sub(r"\1[1, 4, 8]", word)
            )
        optional = optional and not word.endswith("]")
    for index, word in enumerate(words[:-1]):
        if word in ("--output", "--output-json", "-o"):
            words[index + 1] = str(tmp_path / "out.json")
        if word == "--plot":
            words[index + 1] = str(tmp_path / "out.png")
    return words


def smoke_commands() -> list[Command]:
    """Each once, wherever it is written."""
    found = (c for c in COMMANDS if covered_by(c, SMOKE) and not is_mention(c))
    return list({command.words: command for command in found}.values())


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("command", smoke_commands(), ids=lambda command: str(command)[:70])
def test_command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    key = covered_by(command, SMOKE)
    assert key is not None
    words = [*arguments(command, tmp_path), *SMOKE[key]]
    monkeypatch.setattr(sys, "argv", words[1:])
    if words[0] == "vllm":
        assert vllm(words[1:]) == 0
        return
    monkeypatch.chdir(ROOT)
    try:
        if words[1] == "-m":
            monkeypatch.setattr(sys, "argv", words[2:])
            # As in a process of its own, whatever other tests have imported.
            monkeypatch.delitem(sys.modules, words[2], raising=False)
            runpy.run_module(words[2], run_name="__main__", alter_sys=False)
        else:
            monkeypatch.syspath_prepend(str((ROOT / words[1]).parent))
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, None)


SERVED = [c for c in COMMANDS if c.words[:2] == ("vllm", "serve") and not is_mention(c)]


@pytest.mark.parametrize("command", SERVED, ids=lambda command: str(command)[:70])
def test_server_flags_make_a_configuration(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where the weights would be loaded; plug-in files are those of the same page."""
    # What a page's plug-in registers is no parser for the tests after this one.
    monkeypatch.setattr(tool_parsers, "_entries", dict(tool_parsers._entries))
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / command.page).read_text() if "my_parser" in command.text else ""
    for code in re.findall(r"```python\n(# my_parser\.py\n.*?)```", page, re.DOTALL):
        (tmp_path / "my_parser.py").write_text(code)
        monkeypatch.chdir(tmp_path)
    parser = make_arg_parser(FlexibleArgumentParser())
    words = ["--model", *arguments(command, tmp_path)[2:]]
    parsed = parser.parse_args(words)
    FrontEndArgs.from_cli_args(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    if args.kv_transfer_config and "my_package" in str(args.kv_transfer_config):
        return  # the page's own connector lives in a package of the reader
    model = args.create_engine_config().model_config.model
    assert str(Path(model).resolve()) in (MODEL, SUPERNET)


@pytest.mark.parametrize("name", ["vllm bench startup MODEL", "vllm run-batch"])
def test_flags_of_commands_that_are_run_elsewhere(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in COMMANDS:
        if covered_by(command, ELSEWHERE) != name:
            continue
        subcommand = find_command(list(command.words[1:]))
        assert subcommand is not None
        flags = [word for word in command.words if re.match("--?[a-z]", word)]
        with pytest.raises(SystemExit):
            vllm([*subcommand.split(), "--help=all"])
        shown = capsys.readouterr().out
        with pytest.raises(SystemExit):
            vllm([*subcommand.split(), "--help"])
        shown += capsys.readouterr().out
        missing = [flag for flag in flags if flag not in shown]
        assert not missing, str(command)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.words[1] for command in COMMANDS if command.words[0] == "make"]
    assert targets and all(f"\n{target}:" in makefile for target in targets)


def test_the_comparison_with_transformers_runs_as_a_script(tmp_path: Path) -> None:
    """As documented: its folder comes first on the path of its process."""
    (command, *_) = (c for c in COMMANDS if "cpu_vs_transformers.py --dtype bfloat16" in c.text)
    words = arguments(command, tmp_path)[1:]
    small = ["--layers", "4", "--rounds", "1", "--tokens", "2", "--prefill", "16"]
    done = run_python(str(ROOT / words[0]), *words[1:], *small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"instruction_set"' in (tmp_path / "out.json").read_text()


def test_no_script_shadows_a_package() -> None:
    """A script's folder hides packages of the same names from everything it imports."""
    packages = {*importlib.metadata.packages_distributions(), "kernels", "tables"}
    for folder in ("benchmarks", "examples", "docs"):
        names = {path.stem for path in (ROOT / folder).glob("*.py")}
        assert not names & packages, folder


def test_how_commands_are_read() -> None:
    text = (
        "Use `vllm serve X` or `python -m a.b c`, not `ls`.\n```bash\nA=1 vllm serve M \\\n"
        "  --flag '{\"a\":\n 1}' # why\nls\n```\n```console\n$ vllm explain M\nvllm output\n```\n"
        "```python\nvllm = 1\n```\n"
    )
    assert [command.words for command in commands_of("p", text)] == [
        ("vllm", "serve", "M", "--flag", '{"a":\n 1}'),
        ("vllm", "explain", "M"),
        ("vllm", "serve", "X"),
        ("python", "-m", "a.b", "c"),
    ]
