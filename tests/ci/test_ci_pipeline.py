# SPDX-License-Identifier: Apache-2.0
"""The Buildkite pipeline: one source for CI machines and for `.ci/run`."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MARKS = frozenset({"gpu", "nightly", "parity", "e2e", "extraction"})


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline", ROOT / ".buildkite" / "pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pipeline", module)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_a_make_target(pipeline: ModuleType) -> None:
    """CI and a developer run the same thing."""
    makefile = (ROOT / "Makefile").read_text()
    for step in pipeline.load_steps():
        for command in step.commands:
            tool, target = command.split()
            assert tool == "make" and f"\n{target}:" in makefile


def test_the_cpu_steps_are_what_make_test_runs(pipeline: ModuleType) -> None:
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if x.startswith("test:"))
    wanted = line.split("##")[0].split()[1:]
    steps = [s for s in pipeline.load_steps() if s.device is None]
    cpu = [c.split()[1] for s in steps if not s.nightly for c in s.commands]
    assert cpu == wanted
    nightly = [s.commands for s in steps if s.nightly]
    assert nightly == [["make test-nightly"], ["make test-memory"], ["make test-layouts"]]


def test_dependencies_exist(pipeline: ModuleType) -> None:
    for step in pipeline.load_steps():
        for prefix in step.source_file_dependencies:
            assert (ROOT / prefix).exists(), f"{step.label}: {prefix}"


def test_untouched_steps_are_left_out(pipeline: ModuleType) -> None:
    parity = next(s for s in pipeline.load_steps() if s.group == "Parity")
    assert parity.touched_by(["csrc/cpu/norm.cpp"]) and parity.touched_by(None)
    assert not parity.touched_by(["README.md"])


def test_what_every_lane_runs_on_runs_every_lane(pipeline: ModuleType) -> None:
    """The build, the versions of dependencies and the engine; helpers of tests the CPU lanes."""
    build = ["Makefile", "pyproject.toml", "setup.py", "CMakeLists.txt", "csrc/cuda/x.cu"]
    for step in pipeline.load_steps():
        for path in (*build, "vllm/transformers_utils/configs/x.py"):
            assert step.touched_by([path]), (step.label, path)
        if step.device is None:
            assert step.touched_by(["tests/tiny_configs.py"]), step.label


def test_what_unit_tests_read_runs_them(pipeline: ModuleType) -> None:
    """Among them are the tests of the documentation, the benchmarks and this pipeline."""
    unit = next(s for s in pipeline.load_steps() if s.group == "Unit" and s.device is None)
    folders = ("benchmarks", "docs", "examples", ".buildkite")
    for path in (*(f"{folder}/x" for folder in folders), "README.md", "Makefile", "MANIFEST.in"):
        assert unit.touched_by([path]), path


def test_a_base_branch_that_is_not_there_is_named(
    pipeline: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDKITE_PULL_REQUEST_BASE_BRANCH", "no-such-branch")
    with pytest.raises(
        SystemExit, match="(?s)origin/no-such-branch.*git fetch origin no-such-branch"
    ):
        pipeline.emit()


def test_an_unknown_key_is_an_error(
    pipeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("group: A\nsteps:\n  - {label: x, comands: [], gpu: 1}\n")
    monkeypatch.setattr(pipeline, "_AREAS", tmp_path)
    with pytest.raises(ValueError, match="comands"):
        pipeline.load_steps()


def test_the_emitted_pipeline_names_queues() -> None:
    command = [sys.executable, str(ROOT / ".buildkite" / "pipeline.py"), "emit"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    steps = [s for group in yaml.safe_load(out)["steps"] for s in group["steps"]]
    assert {s["agents"]["queue"] for s in steps} == {"cpu", "gpu-h200"}


@pytest.mark.parametrize(("source", "runs"), [("schedule", True), ("webhook", False)])
def test_nightly_steps_run_in_scheduled_builds(
    source: str,
    runs: bool,
    pipeline: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BUILDKITE_SOURCE", source)
    pipeline.emit()
    assert ("make test-nightly" in capsys.readouterr().out) == runs


def test_a_failing_step_stops_the_run(
    pipeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(
        "group: A\nsteps:\n"
        "  - {label: skipped, timeout_in_minutes: 1, device: h200, commands: ['touch gpu']}\n"
        "  - {label: later, timeout_in_minutes: 1, nightly: true, commands: ['touch later']}\n"
        "  - {label: bad, timeout_in_minutes: 1, commands: ['exit 7']}\n"
        "  - {label: never, timeout_in_minutes: 1, commands: ['touch never']}\n"
    )
    monkeypatch.setattr(pipeline, "_AREAS", tmp_path)
    monkeypatch.setattr(pipeline, "_ROOT", tmp_path)
    assert pipeline.run() == 7
    assert not any((tmp_path / name).exists() for name in ("never", "gpu", "later"))


def test_test_modules_have_unique_names() -> None:
    """pytest imports them by base name, so two of a name cannot be collected together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


@functools.cache
def lanes() -> dict[str, tuple[list[str], str]]:
    """Make target -> what it collects, options among it, and the marks it selects."""
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^(test-\w+):.*\n.*\$\(PARALLEL\) (.*) -m \"\$\((\w+)\)\"", text, re.M)
    expressions = dict(re.findall(r"^(\w+) := (.*)$", text, re.M))
    return {target: (paths.split(), expressions[name]) for target, paths, name in found}


def lanes_of(marks: frozenset[str]) -> list[str]:
    """The lanes that run a test with these marks."""
    values = {mark: mark in marks for mark in MARKS}
    return [target for target, (_, expression) in lanes().items() if eval(expression, {}, values)]


def marks_of_tests(file: Path) -> set[frozenset[str]]:
    """The sets of marks that tests of a file carry."""

    def named(nodes: list[ast.expr]) -> frozenset[str]:
        parts = (part for node in nodes for part in ast.walk(node))
        return MARKS & {part.attr for part in parts if isinstance(part, ast.Attribute)}

    body = ast.parse(file.read_text()).body
    shared = named(
        [x.value for x in body if isinstance(x, ast.Assign) and "pytestmark" in ast.unparse(x)]
    )
    functions = [x for x in body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {shared | named(f.decorator_list) for f in functions if f.name.startswith("test_")}


def is_collected(file: Path, folders: list[str]) -> bool:
    left_out = [f.removeprefix("--ignore=") for f in folders if f.startswith("--ignore=")]
    return not any(file.is_relative_to(ROOT / folder) for folder in left_out) and any(
        file.is_relative_to(ROOT / folder) for folder in folders if not folder.startswith("--")
    )


def test_every_test_runs_in_one_lane() -> None:
    assert len(lanes()) == 5
    for count in range(len(MARKS) + 1):
        for marks in map(frozenset, itertools.combinations(MARKS, count)):
            assert len(lanes_of(marks)) == ("gpu" not in marks), marks


def test_a_lane_collects_the_folders_of_its_tests() -> None:
    for file in (ROOT / "tests").rglob("test_*.py"):
        for marks in marks_of_tests(file):
            for target in lanes_of(marks):
                assert is_collected(file, lanes()[target][0]), (target, file)


def test_a_changed_test_runs_its_lane(pipeline: ModuleType) -> None:
    steps = {command.split()[1]: s for s in pipeline.load_steps() for command in s.commands}
    for target, (paths, _) in lanes().items():
        for path in (path for path in paths if not path.startswith("--")):
            assert steps[target].touched_by([f"{path}/test_x.py"]), (target, path)


def test_handing_out_tests_imports_no_torch() -> None:
    """The workers start after pytest has read the conftest files of a lane's folders."""
    folders = [Path(p) for paths, _ in lanes().values() for p in paths if not p.startswith("--")]
    files = {parent / "conftest.py" for f in folders for parent in (f, *f.parents)}
    names = [".".join(file.with_suffix("").parts) for file in files if (ROOT / file).exists()]
    assert {"tests.conftest", "tests.e2e.conftest", "tests.parity.conftest"} <= set(names)
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print('torch' in sys.modules)\n"
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_suite_keeps_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would compile the package again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    asks = 'include Makefile\nasked:\n\t@echo "[$$PYTHONDONTWRITEBYTECODE]"\n'
    command = ["make", "-s", "-f", "-", "asked"]
    done = subprocess.run(command, cwd=ROOT, input=asks, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
