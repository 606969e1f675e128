# SPDX-License-Identifier: Apache-2.0
"""The environment variables that are read, with type, default and meaning."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.logger import LEVELS


@dataclass(frozen=True)
class Variable:
    """`default` is a value, or a function evaluated at each look-up. `instead`: of one that has no
    effect, though it might be expected to have some, what has."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    instead: str = ""


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _optional(text: str) -> str | None:
    return text or None


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return parse


def _layout(text: str) -> str:
    return _one_of("NHD", "HND")(text.upper())


def _xdg(variable: str, fallback: str) -> Callable[[], str]:
    def default() -> str:
        base = os.environ.get(variable) or os.path.expanduser(fallback)
        return os.path.join(base, "vllm")

    return default


def _rpc_base() -> str:
    import tempfile

    return tempfile.gettempdir()


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError("expected more than 0")
        return value

    return parse


def _not_negative(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError("expected 0 or more")
    return value


def _level(text: str) -> str:
    return _one_of(*LEVELS)(text.upper())


_REPLICAS = "--data-parallel-size and --data-parallel-rank, and a part of CUDA_VISIBLE_DEVICES"
_VARIABLES = (
    # logging and telemetry
    Variable("VLLM_CONFIGURE_LOGGING", _bool, True, "0 leaves logging to the application"),
    Variable("VLLM_LOGGING_LEVEL", _level, "INFO", "level of the vllm loggers"),
    Variable("VLLM_LOGGING_CONFIG_PATH", _optional, None, "JSON file for logging.dictConfig"),
    Variable("VLLM_LOGGING_PREFIX", str, "", "text before each log line"),
    Variable(
        "VLLM_LOG_STATS_INTERVAL", _positive(float), 10.0, "seconds between throughput log lines"
    ),
    Variable("VLLM_NO_USAGE_STATS", _bool, False, "accepted; nothing is ever reported"),
    Variable("VLLM_DO_NOT_TRACK", _bool, False, "accepted; nothing is ever reported"),
    Variable("VLLM_STARTUP_PHASES", _optional, None, "file for the phases of the start"),
    # processes
    Variable(
        "VLLM_WORKER_MULTIPROC_METHOD",
        _one_of("fork", "spawn", "forkserver"),
        "fork",
        "how processes start; fork only where that is safe",
    ),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", _bool, True, "0 runs the engine core in process"),
    Variable("VLLM_ALLOW_INSECURE_SERIALIZATION", _bool, False, "pickle callables over RPC"),
    Variable("VLLM_RPC_BASE_PATH", str, _rpc_base, "directory of the engine's IPC sockets"),
    Variable(
        "VLLM_ENGINE_READY_TIMEOUT_S", _positive(int), 600, "seconds to wait for the engine's start"
    ),
    Variable(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        _positive(int),
        None,
        "seconds to wait for one step; by default 300, and 20 with workers on several GPUs",
    ),
    Variable(
        "VLLM_PP_LAYER_PARTITION",
        _counts,
        None,
        "comma list of layers per pipeline stage; unset: by predicted cost",
    ),
    Variable("VLLM_PLUGINS", _names, None, "comma list of plugins to load; unset: all"),
    Variable("VLLM_HOST_IP", _optional, None, "unused", "--master-addr"),
    Variable("VLLM_PORT", int, None, "unused", "--master-port"),
    # server
    Variable("VLLM_API_KEY", _optional, None, "key that HTTP requests must present"),
    Variable(
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _not_negative, 5, "seconds an idle connection is kept"
    ),
    Variable("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", _bool, False, "keep serving errors"),
    Variable("VLLM_RESTARTS", str, "", "set by --on-failure restart: when the server restarted"),
    Variable("VLLM_SERVER_DEV_MODE", _bool, False, "mount the development routes"),
    Variable("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", _bool, False, "log response bodies"),
    Variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", _bool, False, "mount the adapter routes"),
    Variable("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", _bool, False, "keep request ids as given"),
    Variable("VLLM_MAX_N_SEQUENCES", int, 16384, "largest n of a request"),
    Variable("VLLM_IMAGE_FETCH_TIMEOUT", int, 5, "seconds to fetch an image"),
    # memory and devices
    Variable(
        "VLLM_TARGET_DEVICE",
        _one_of("cpu", "cuda"),
        None,
        "device to run on; unset: cuda when a GPU is present, else cpu",
    ),
    Variable("VLLM_CPU_KVCACHE_SPACE", float, 4.0, "GiB of state memory on the CPU"),
    Variable("VLLM_KV_CACHE_LAYOUT", _layout, None, "NHD or HND stride order of KV caches"),
    Variable("VLLM_ALLOW_LONG_MAX_MODEL_LEN", _bool, False, "allow exceeding the model's length"),
    Variable("VLLM_BATCH_INVARIANT", _bool, False, "ask for batch-invariant kernels"),
    Variable("VLLM_SKIP_P2P_CHECK", _bool, False, "accepted"),
    Variable("VLLM_SANITIZE", _bool, False, "check every use of state memory, as --sanitize"),
    Variable(
        "VLLM_TUNED_CONFIG_FOLDER",
        _optional,
        None,
        "folder of launch parameters written by vllm tune; read before the shipped ones",
    ),
    # caches, connectors and events
    Variable("VLLM_CACHE_ROOT", str, _xdg("XDG_CACHE_HOME", "~/.cache"), "cache directory"),
    Variable("VLLM_CONFIG_ROOT", str, _xdg("XDG_CONFIG_HOME", "~/.config"), "config directory"),
    Variable("VLLM_DISABLE_COMPILE_CACHE", _bool, False, "accepted; there is no compile cache"),
    Variable("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", _bool, True, "64-bit hashes in KV events"),
    Variable("VLLM_NIXL_SIDE_CHANNEL_HOST", str, "localhost", "NIXL handshake host"),
    Variable("VLLM_NIXL_SIDE_CHANNEL_PORT", int, 5600, "NIXL handshake port"),
    Variable("VLLM_USE_MODELSCOPE", _bool, False, "accepted; checkpoints come from the HF hub"),
    # data parallelism
    Variable("VLLM_DP_RANK", int, 0, "unused", _REPLICAS),
    Variable("VLLM_DP_RANK_LOCAL", int, -1, "unused", _REPLICAS),
    Variable("VLLM_DP_SIZE", int, 1, "unused", _REPLICAS),
    Variable("VLLM_DP_MASTER_IP", str, "127.0.0.1", "accepted; replicas need not meet"),
    Variable("VLLM_DP_MASTER_PORT", int, 0, "accepted; replicas need not meet"),
    # set by scripts written for other releases; nothing depends on them
    Variable("VLLM_USE_V1", _bool, True, "accepted; there is one engine"),
    Variable("VLLM_ATTENTION_BACKEND", _optional, None, "accepted; see --attention-backend"),
    Variable("VLLM_TRACE_FUNCTION", _bool, False, "accepted"),
)

TABLE: dict[str, Variable] = {variable.name: variable for variable in _VARIABLES}
