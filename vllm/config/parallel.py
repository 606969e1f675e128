# SPDX-License-Identifier: Apache-2.0
"""How the model is spread over devices."""

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vllm.config.eplb import EPLBConfig
from vllm.config.replica_flags import ReplicaFlags
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option

#: sizes that only 1 is supported of: field -> (flag, what to do instead)
_SIZES: dict[str, tuple[str, str]] = {
    "decode_context_parallel_size": ("--decode-context-parallel-size", "leave it at 1"),
}
#: of `--distributed-timeout-seconds`, for hosts that wait for each other
_HOSTS_TIMEOUT_S = 300


@config
class ParallelConfig:
    """Spread over devices: the workers of a replica, and the hosts that have them."""

    tensor_parallel_size: PositiveInt = option(
        default=1,
        aliases=("-tp",),
        help="Workers that share each layer, each with a part of its heads, columns and state: "
        "a process each, on GPUs one per GPU (docs/parallel.md).",
    )
    pipeline_parallel_size: PositiveInt = option(
        default=1,
        aliases=("-pp",),
        help="Stages that share the layer stack, each with a part of it and its state; a stage is "
        "--tensor-parallel-size workers. See docs/pipeline_parallel.md.",
    )
    data_parallel_size: PositiveInt = option(
        default=1,
        aliases=("-dp",),
        help="Replicas of the model, each with devices and state memory of its own "
        "(docs/parallel.md).",
    )
    data_parallel_size_local: PositiveInt | None = option(
        default=None,
        aliases=("-dpl",),
        help="Replicas that this server runs; all by default. Fewer with "
        "`--data-parallel-hybrid-lb`.",
    )
    asked_data_parallel_rank: int | None = option(
        default=None,
        name="data_parallel_rank",
        aliases=("-dpn",),
        help="Run this replica alone; the others have servers of their own, behind a load balancer "
        "that is not ours.",
    )
    data_parallel_start_rank: int | None = option(
        default=None,
        aliases=("-dpr",),
        help="The first of the `--data-parallel-size-local` replicas that this server runs; "
        "implies `--data-parallel-hybrid-lb`.",
    )
    data_parallel_external_lb: bool = option(
        default=False,
        aliases=("-dpe",),
        help="A server per replica, which `--data-parallel-rank` says already.",
    )
    data_parallel_hybrid_lb: bool = option(
        default=False,
        aliases=("-dph",),
        help="A server for some of the replicas, from `--data-parallel-start-rank` (0) on.",
    )
    data_parallel_address: str | None = option(
        default=None,
        aliases=("-dpa",),
        help="Where replicas of other hosts would meet: those of a server of their own "
        "(`--data-parallel-rank`, `--data-parallel-start-rank`) need not, and it is unused.",
    )
    data_parallel_rpc_port: int | None = option(
        default=None, aliases=("-dpp",), help="The port, as `--data-parallel-address`."
    )
    data_parallel_backend: Literal["mp", "ray"] = option(
        default="mp",
        aliases=("-dpb",),
        help="What starts replicas: each is a process of its server's host. `ray` only with "
        "`--data-parallel-rank` or `--data-parallel-start-rank`, where it is unused.",
    )
    decode_context_parallel_size: PositiveInt = option(
        default=1, aliases=("-dcp",), help="Devices that share a sequence's cache (only 1 so far)."
    )
    enable_expert_parallel: bool = option(
        default=False,
        aliases=("-ep",),
        help="Give each worker, of all replicas, whole experts of a mixture instead of a part of "
        "each expert of its replica. Replicas then take their steps together (docs/parallel.md).",
    )
    enable_eplb: bool = option(
        default=False,
        help="With --enable-expert-parallel: move experts between workers as the traffic asks for, "
        "and copy the busiest (docs/parallel.md).",
    )
    eplb_config: EPLBConfig = option(
        default_factory=EPLBConfig,
        resolved=True,
        kind=FlagKind.JSON,
        help='Settings of --enable-eplb, a JSON object: {"num_redundant_experts": 8}; also '
        "window_size (1000), step_interval (3000), log_balancedness.",
    )
    distributed_executor_backend: str | None = option(
        default=None,
        help="How workers run: `uni` is one worker in the engine's process, `mp` a process per "
        "worker, on this host or on `--nnodes`, `ray` an actor per worker, where Ray finds room "
        "(docs/parallel.md). Default: `uni` for one worker, else `mp`.",
    )
    disable_custom_all_reduce: bool = option(
        default=False,
        help="Use NCCL for all sums, also those that GPUs of a host take through shared memory.",
    )
    worker_extension_cls: str = option(
        default="",
        help="Dotted path of a class whose methods become callable on the worker by "
        "`collective_rpc`.",
    )
    nnodes: PositiveInt = option(
        default=1,
        aliases=("-n",),
        help="Hosts that share the workers, equally many each. Those other than the first run "
        "`vllm serve` with the same flags, their --node-rank and --headless (docs/parallel.md).",
    )
    node_rank: NonNegativeInt = option(
        default=0,
        aliases=("-r",),
        help="This host among --nnodes. 0 has the API, the engine and the first workers.",
    )
    master_addr: str = option(
        default="127.0.0.1",
        help="Address of the first host, at which it listens for the others; unused with one host.",
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] = option(
        default=29501,
        help="Port at which the first host listens for the others; unused with one host.",
    )
    distributed_timeout_seconds: PositiveInt | None = option(
        default=None,
        help="Longest wait of one worker for another at the start and in a collective outside of "
        "graphs; torch's own by default (30 minutes on CPUs, 10 on GPUs). Also the longest wait of "
        "one host for another at the start, 300 by default. Unused with one worker.",
    )
    data_parallel_rank: int = option(default=0, flag=False, help="This replica.")
    rank: int = option(default=0, flag=False, help="This worker among all.")
    data_parallel_index: int = option(default=0, flag=False, help="This engine among all replicas.")
    meeting_directory: str = option(
        default="", flag=False, help="Where replicas that share experts find each other."
    )

    def __post_init__(self) -> None:
        for field, (flag, instead) in _SIZES.items():
            size: Any = getattr(self, field)
            if size > 1:
                raise VLLMValidationError(
                    f"{flag} {size} is not supported yet, only 1; {instead}", field, size
                )
        _ = self.local_ranks  # checks its flags
        self.replica_flags.check_meeting()
        if self.replicas_share_experts:
            self._check_shared_experts()
        self._check_eplb()
        self._check_nodes()
        backend = self.distributed_executor_backend
        if backend not in (None, "uni", "mp", "ray"):
            raise VLLMValidationError(
                f"--distributed-executor-backend {backend} is not supported; use mp (a process per "
                "worker, on one host or on --nnodes), ray (an actor per worker) or uni (one "
                "worker)",
                "distributed_executor_backend",
                backend,
            )
        if backend == "ray":
            self._check_ray()
        if backend == "uni" and self.world_size > 1:
            raise VLLMValidationError(
                f"--distributed-executor-backend uni is one worker; --tensor-parallel-size "
                f"{self.tensor_parallel_size} with --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} needs mp",
                "distributed_executor_backend",
                backend,
            )

    def _check_shared_experts(self) -> None:
        """Replicas that take steps together are the cores of one server on one host."""
        flags = f"--enable-expert-parallel with --data-parallel-size {self.data_parallel_size}"
        if len(self.local_ranks) < self.data_parallel_size:
            raise VLLMValidationError(
                f"{flags}: replicas that share experts take every step together, so one server "
                "runs all of them; leave out --data-parallel-rank, --data-parallel-start-rank and "
                "--data-parallel-size-local, or leave out --enable-expert-parallel",
                "enable_expert_parallel",
            )
        if self.pipeline_parallel_size > 1:
            raise VLLMValidationError(
                f"{flags}: stages of several replicas do not share experts; use "
                "--tensor-parallel-size instead of --pipeline-parallel-size, or leave out "
                "--enable-expert-parallel",
                "pipeline_parallel_size",
                self.pipeline_parallel_size,
            )

        if self.nnodes > 1 or self.distributed_executor_backend == "ray":
            raise VLLMValidationError(
                f"{flags}: replicas that share experts are processes of one host; for several "
                "hosts, or Ray, use --tensor-parallel-size instead of --data-parallel-size",
                "enable_expert_parallel",
            )

    def _check_eplb(self) -> None:
        """Experts move between ranks that have whole ones."""
        if not self.enable_eplb and self.eplb_config != EPLBConfig():
            raise VLLMValidationError(
                "--eplb-config has no effect without --enable-eplb; add it", "eplb_config"
            )
        ranks = self.tensor_parallel_size * self.data_parallel_size
        if self.enable_eplb and (ranks == 1 or not self.enable_expert_parallel):
            raise VLLMValidationError(
                "--enable-eplb moves experts between ranks that have whole ones: it needs "
                "--enable-expert-parallel, and --tensor-parallel-size or --data-parallel-size "
                "above 1; add them, or leave it out",
                "enable_eplb",
            )

    def _check_nodes(self) -> None:
        """The hosts share the workers of one replica equally."""
        nodes, tp, pp = self.nnodes, self.tensor_parallel_size, self.pipeline_parallel_size
        if self.world_size % nodes:
            raise VLLMValidationError(
                f"--nnodes {nodes}: the hosts have equally many workers, and {nodes} do not divide "
                f"{self.world_size} (--tensor-parallel-size {tp} times --pipeline-parallel-size "
                f"{pp}); choose sizes whose product is a multiple of {nodes}",
                "nnodes",
                nodes,
            )
        if self.node_rank and nodes == 1:
            raise VLLMValidationError(
                f"--node-rank {self.node_rank} is one of several hosts, and --nnodes is 1; add "
                "--nnodes N, as on the other hosts, or leave out --node-rank",
                "node_rank",
                self.node_rank,
            )
        if self.node_rank >= nodes:
            raise VLLMValidationError(
                f"--node-rank {self.node_rank} with --nnodes {nodes}: must be 0 to {nodes - 1}",
                "node_rank",
                self.node_rank,
            )
        if nodes > 1 and len(self.local_ranks) > 1:
            raise VLLMValidationError(
                f"--nnodes {nodes} with {len(self.local_ranks)} replicas: hosts share the workers "
                "of one replica; start a server per replica, each with hosts of its own and "
                "--data-parallel-rank",
                "nnodes",
                nodes,
            )

    def _check_ray(self) -> None:
        """Ray is there, and chooses the hosts."""
        if find_spec("ray") is None:
            raise VLLMValidationError(
                "--distributed-executor-backend ray needs the package ray: pip install vllm[ray]; "
                "or use mp",
                "distributed_executor_backend",
                "ray",
            )
        if self.nnodes > 1:
            raise VLLMValidationError(
                f"--nnodes {self.nnodes} with --distributed-executor-backend ray: Ray chooses the "
                "hosts, and nothing is started on them by hand; leave out --nnodes, or use mp",
                "nnodes",
                self.nnodes,
            )
        if len(self.local_ranks) > 1:
            raise VLLMValidationError(
                f"--distributed-executor-backend ray with {len(self.local_ranks)} replicas: Ray "
                "places the workers of one; start a server per replica with --data-parallel-rank",
                "distributed_executor_backend",
                "ray",
            )

    def check_experts(self, has_some: bool) -> None:
        """`VLLMValidationError` where experts are to be spread and the model has none."""
        if self.enable_expert_parallel and not has_some:
            raise VLLMValidationError(
                "--enable-expert-parallel: the model has no experts; leave it out",
                "enable_expert_parallel",
            )

    @property
    def local_ranks(self) -> range:
        """The replicas of this server."""
        return self.replica_flags.local_ranks()

    @property
    def replica_flags(self) -> ReplicaFlags:
        """What was said about replicas."""
        return ReplicaFlags(
            self.data_parallel_size,
            self.data_parallel_size_local,
            self.asked_data_parallel_rank,
            self.data_parallel_start_rank,
            self.data_parallel_external_lb,
            self.data_parallel_hybrid_lb,
            self.data_parallel_address,
            self.data_parallel_rpc_port,
            self.data_parallel_backend,
        )

    @property
    def replicas_share_experts(self) -> bool:
        """Whether each replica has a part of the experts, and all take their steps together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def replica(self) -> int | None:
        """The rank of this replica, where there are several."""
        return self.data_parallel_rank if self.data_parallel_size > 1 else None

    @property
    def executor_backend(self) -> str:
        """What `--distributed-executor-backend` came to."""
        return self.distributed_executor_backend or ("mp" if self.world_size > 1 else "uni")

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def joint_world_size(self) -> int:
        """Workers that have collectives together: those of one replica, or of all that share
        experts."""
        return self.world_size * (self.data_parallel_size if self.replicas_share_experts else 1)

    @property
    def local_world_size(self) -> int:
        """Workers of one replica on each host."""
        return self.world_size // self.nnodes

    @property
    def hosts_timeout_s(self) -> int:
        """Longest wait of one host for another at the start."""
        return self.distributed_timeout_seconds or _HOSTS_TIMEOUT_S

    @property
    def output_rank(self) -> int:
        """The worker whose samples are a step's result: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size
