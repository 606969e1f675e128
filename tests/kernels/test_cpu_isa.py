# SPDX-License-Identifier: Apache-2.0
"""The same kernels compiled for other instruction sets, and the pool of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forked_python
from tests.nightly import nightly
from vllm.kernels.cpu import CpuKernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VARIANTS = ["baseline", "avx2", "avx512", "avx512_bf16"]  # each implies those before it
OTHERS = VARIANTS[: VARIANTS.index(CpuKernels().isa)]


def run_python(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif("VLLM_CPU_ISA" in os.environ, reason="already narrowed to one")
@pytest.mark.parametrize("isa", [*OTHERS[:2], *nightly(*OTHERS[2:])])
def test_kernels_of_another_instruction_set(isa: str) -> None:
    tested = ("norm", "attention", "gdn", "linear", "experts")
    files = [str(ROOT / "tests" / "kernels" / f"test_cpu_{name}.py") for name in tested]
    environment = os.environ | {"VLLM_CPU_ISA": isa, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # They need no plug-ins, which take longer than a test; nor the one that keeps the log.
    plain = ("-q", "-x", "-p", "no:logging", "-p", "no:cacheprovider")
    done = forked_python.run_python("pytest", *plain, "-k", "fp64", *files, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_the_environment_chooses_the_instruction_set(tmp_path: Path) -> None:
    script = tmp_path / "isa.py"
    script.write_text("from vllm.kernels.cpu import CpuKernels; print(CpuKernels().isa)")

    def run(isa: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"VLLM_CPU_ISA": isa}
        return forked_python.run_python(str(script), env=environment)

    assert run("baseline").stdout.strip() == "baseline"
    unknown = run("mmx")
    assert "VLLM_CPU_ISA=mmx is not an instruction set" in unknown.stderr


THREADS = """
import torch
from tests.kernels.cases import attention_case, gdn_case, gdn_decode_case, run
from vllm.kernels.cpu import CpuKernels

kernels, results = CpuKernels(), {}
for threads in (1, 2, 5):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    f32 = torch.float32
    cases = {
        "paged_attention": [
            attention_case([(1, 900)], (4, 1, 64), f32, "cpu"),
            attention_case([(1, 300), (200, 260), (1, 7)], (4, 2, 64), f32, "cpu"),
        ],
        "gdn_prefill": [gdn_case([130, 40], [True, False], (2, 4, 32, 24), f32, "cpu")],
        "gdn_decode": [gdn_decode_case(9, (2, 4, 64, 64), f32, "cpu")],
    }
    outs = []
    for op, of_op in cases.items():
        for case in of_op:
            run(kernels, op, case)
            outs += [case["out"], case.get("ssm_state", case["out"]).nan_to_num()]
    x = torch.randn(3000, 320)
    outs += [kernels.rms_norm(x, x[0], 1e-6), kernels.silu_and_mul(x)]
    results[threads] = outs
for threads in (2, 5):
    assert all(map(torch.equal, results[1], results[threads])), threads
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
assert len(libraries) <= 1, libraries
print("same bits")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_thread_counts_give_the_same_bits_and_one_openmp_runtime() -> None:
    done = run_python(["-c", THREADS], OMP_NUM_THREADS="5")
    assert done.stdout.strip() == "same bits", done.stderr[-3000:]


def test_set_num_threads_is_honoured() -> None:
    """With one thread no other thread of the process gains CPU time."""
    code = (
        "import os, torch\n"
        "from vllm.kernels.cpu import CpuKernels\n"
        "torch.set_num_threads(1)\n"
        "kernels, x = CpuKernels(), torch.randn(4000, 640)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "kernels.silu_and_mul(x)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
        "torch.set_num_threads(3)\n"
        "kernels.silu_and_mul(x)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    assert run_python(["-c", code], OMP_NUM_THREADS="3").stdout.split() == ["0", "2"]


def test_missing_library_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _extension

    monkeypatch.setattr(_extension, "LIBRARY", ROOT / "vllm" / "_C_absent.so")
    with pytest.raises(RuntimeError, match="the CPU ops are not built: .*_C_absent.so is missing"):
        _extension.load_cpu_ops.__wrapped__()


def test_library_that_does_not_load_names_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm import _extension

    broken = tmp_path / "_C_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_extension, "LIBRARY", broken)
    with pytest.raises(RuntimeError, match=f"does not load with torch {torch.__version__[:4]}"):
        _extension.load_cpu_ops.__wrapped__()
