# SPDX-License-Identifier: Apache-2.0
"""Ray's cluster of two nodes on this machine, in a process of its own: Ray's connections do not
survive the forks of other tests.

As a script: prints the address, then answers each line that it reads, and ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

import psutil

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_STORE_BYTES = 80_000_000


class RayCluster:
    """Two nodes with one CPU each, from entering the context to leaving it."""

    def __enter__(self) -> RayCluster:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        self.address = str(self._read())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        whole = psutil.Process(self._process.pid).children(recursive=True)
        self._process.communicate()
        for process in psutil.wait_procs(whole, timeout=20)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "the cluster has ended"
        return json.loads(line)["answer"]

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._read()

    def free_cpus(self) -> float:
        """Those that no actor and no placement group has."""
        return float(self._ask("free"))

    def kill_second_node(self) -> None:
        """As a machine that loses its power: Ray's processes there are killed."""
        self._ask("kill")

    def actors(self, kind: str = "RayWorker") -> list[psutil.Process]:
        """The processes of workers, or of actors of another class."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one that has just ended
                if f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process)
        return found


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    print(json.dumps({"answer": cluster.address}), flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        print(json.dumps({"answer": ray.available_resources().get("CPU", 0)}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
