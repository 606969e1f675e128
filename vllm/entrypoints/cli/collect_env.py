# SPDX-License-Identifier: Apache-2.0
"""`vllm collect-env`: versions and devices, for bug reports."""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "flashinfer-python",
    "xgrammar",
)
_VARIABLE_PREFIXES = ("VLLM_", "CUDA_", "NCCL_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
#: variables whose value must not end up in a bug report
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def describe_packages() -> Iterator[tuple[str, str]]:
    """Installed versions of what the engine uses."""
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def describe_devices() -> Iterator[tuple[str, str]]:
    """CPU and, when torch sees them, GPUs."""
    import torch

    yield "cpu", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    yield "torch CUDA", str(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        yield f"gpu {index}", f"{properties.name}, {gib:.1f} GiB, compute {capability}"


def describe_environment() -> Iterator[tuple[str, str]]:
    """Relevant environment variables, secrets blanked."""
    for name in sorted(os.environ):
        if name.startswith(_VARIABLE_PREFIXES):
            yield name, "***" if any(word in name for word in _SECRET) else os.environ[name]


class CollectEnvCommand(CLISubcommand):
    """Prints the report."""

    description = "Describe this machine for bug reports."

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """No flags."""

    def run(self, args: argparse.Namespace) -> int:
        system = [
            ("vllm", __version__),
            ("python", sys.version.replace("\n", " ")),
            ("platform", platform.platform()),
        ]
        for title, rows in (
            ("System", system),
            ("Packages", describe_packages()),
            ("Devices", describe_devices()),
            ("Environment", describe_environment()),
        ):
            print(f"== {title}")
            for name, value in rows:
                print(f"{name}: {value}")
        return 0
