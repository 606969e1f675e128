# SPDX-License-Identifier: Apache-2.0
"""Which replicas of a model a server runs, from the `--data-parallel-...` flags."""

from dataclasses import dataclass

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class ReplicaFlags:
    """What the `--data-parallel-...` flags say; None is a flag that is absent.

    Replicas that have all experts compute nothing together, so servers that share them need not
    know of each other.
    """

    size: int
    size_local: int | None
    rank: int | None
    start_rank: int | None
    external_lb: bool
    hybrid_lb: bool
    address: str | None = None
    rpc_port: int | None = None
    backend: str = "mp"

    @property
    def meeting(self) -> dict[str, object]:
        """The given flags that say how replicas of several hosts would be started and meet."""
        given: dict[str, object] = {}
        if self.address is not None:
            given["--data-parallel-address"] = self.address
        if self.rpc_port is not None:
            given["--data-parallel-rpc-port"] = self.rpc_port
        if self.backend != "mp":
            given["--data-parallel-backend"] = self.backend
        return given

    def check_meeting(self) -> None:
        """Raise `VLLMValidationError` for `meeting`, unless servers have the replicas."""
        servers = self.external_lb or self.hybrid_lb
        if servers or self.rank is not None or self.start_rank is not None:
            return
        for flag, value in self.meeting.items():
            raise VLLMValidationError(
                f"{flag} {value}: one server cannot start or reach replicas on other hosts; leave "
                "it out on one host, or start a server per host with --data-parallel-size-local "
                "and --data-parallel-start-rank, or per replica with --data-parallel-rank, behind "
                "a load balancer",
                flag.removeprefix("--").replace("-", "_"),
                value,
            )

    def local_ranks(self) -> range:
        """The ranks of this server's replicas; `VLLMValidationError` for flags that contradict
        each other, or that ask for replicas elsewhere."""
        if self.size_local is not None and self.size_local > self.size:
            raise VLLMValidationError(
                f"--data-parallel-size-local {self.size_local} is more than all replicas, "
                f"--data-parallel-size {self.size}; raise that, or leave out "
                "--data-parallel-size-local to run all of them here",
                "data_parallel_size_local",
                self.size_local,
            )
        if self.rank is not None or self.external_lb:
            return self._external()
        if self.hybrid_lb or self.start_rank is not None:
            return self._hybrid()
        if self.size_local not in (None, self.size):
            raise VLLMValidationError(
                f"--data-parallel-size-local {self.size_local} of --data-parallel-size {self.size}:"
                " one server cannot reach replicas on other hosts; start a server for each part "
                "with --data-parallel-hybrid-lb and --data-parallel-start-rank, behind a load "
                "balancer",
                "data_parallel_size_local",
                self.size_local,
            )
        return range(self.size)

    def _external(self) -> range:
        """One replica per server."""
        if self.hybrid_lb or self.start_rank is not None:
            raise VLLMValidationError(
                "--data-parallel-rank and --data-parallel-external-lb are for servers with one "
                "replica, --data-parallel-hybrid-lb and --data-parallel-start-rank for servers "
                "with several; use one of them",
                "data_parallel_rank",
                self.rank,
            )
        if self.rank is None:
            raise VLLMValidationError(
                "--data-parallel-external-lb needs --data-parallel-rank: which replica this "
                "server is",
                "data_parallel_external_lb",
            )
        if self.size_local not in (None, 1):
            raise VLLMValidationError(
                f"--data-parallel-rank is for one replica, --data-parallel-size-local "
                f"{self.size_local} for several; use --data-parallel-start-rank",
                "data_parallel_size_local",
                self.size_local,
            )
        return self._within("rank", self.rank, 1)

    def _hybrid(self) -> range:
        """Some of the replicas."""
        if self.size_local is None:
            raise VLLMValidationError(
                "--data-parallel-hybrid-lb and --data-parallel-start-rank need "
                "--data-parallel-size-local: how many of the replicas this server runs",
                "data_parallel_size_local",
            )
        return self._within("start_rank", self.start_rank or 0, self.size_local)

    def _within(self, field: str, first: int, count: int) -> range:
        if first < 0 or first + count > self.size:
            flag = f"--data-parallel-{field.replace('_', '-')} {first}"
            raise VLLMValidationError(
                f"{flag} with {count} replicas here: ranks are 0 to --data-parallel-size less 1, "
                f"{self.size - 1}",
                f"data_parallel_{field}",
                first,
            )
        return range(first, first + count)
