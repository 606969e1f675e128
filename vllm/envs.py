# SPDX-License-Identifier: Apache-2.0
"""Environment variables: one table, read lazily each time an attribute is looked up."""

import os
from typing import TYPE_CHECKING, Any

from vllm.envs_table import TABLE, Variable
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    VLLM_ALLOW_INSECURE_SERIALIZATION: bool
    VLLM_ALLOW_LONG_MAX_MODEL_LEN: bool
    VLLM_API_KEY: str | None
    VLLM_CACHE_ROOT: str
    VLLM_CPU_KVCACHE_SPACE: float
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: bool
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_ENGINE_READY_TIMEOUT_S: int
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: int | None
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: bool
    VLLM_KV_CACHE_LAYOUT: str | None
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: bool
    VLLM_LOG_STATS_INTERVAL: float
    VLLM_MAX_N_SEQUENCES: int
    VLLM_PLUGINS: list[str] | None
    VLLM_PP_LAYER_PARTITION: list[int] | None
    VLLM_RESTARTS: str
    VLLM_RPC_BASE_PATH: str
    VLLM_SANITIZE: bool
    VLLM_SERVER_DEV_MODE: bool
    VLLM_TARGET_DEVICE: str | None
    VLLM_TUNED_CONFIG_FOLDER: str | None
    VLLM_WORKER_MULTIPROC_METHOD: str


def _read(variable: Variable) -> Any:
    text = os.environ.get(variable.name)
    if text is None:
        return variable.default() if callable(variable.default) else variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise VLLMValidationError(
            f"environment variable {variable.name}={text!r}: {error}"
        ) from None


def __getattr__(name: str) -> Any:
    if name in TABLE:
        return _read(TABLE[name])
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(TABLE)


def unknown_variables() -> list[str]:
    """`VLLM_*` variables of the environment that nothing here reads."""
    return sorted(n for n in os.environ if n.startswith("VLLM_") and n not in TABLE)


def check_variables() -> None:
    """`VLLMValidationError` for a variable that cannot be read: many are looked up only when a
    request runs. Those that have no effect may have any value."""
    from vllm.logger import configuration_problem

    if problem := configuration_problem():
        raise VLLMValidationError(problem)
    for variable in TABLE.values():
        if not variable.instead:
            _read(variable)


def warn_unknown_variables() -> None:
    """Log one warning that lists unknown `VLLM_*` variables, which are often typing errors, and one
    for each that has no effect."""
    from vllm.logger import init_logger

    for name, variable in TABLE.items():
        # Not parsed: Kubernetes sets VLLM_PORT=tcp://... where a service is called vllm.
        value = os.environ.get(name, "")
        if variable.instead and value not in ("", str(variable.default)):
            text = "%s=%s has no effect; use %s"
            init_logger(__name__).warning(text, name, value, variable.instead)
    unknown = unknown_variables()
    if unknown:
        init_logger(__name__).warning("unknown environment variables: %s", ", ".join(unknown))
