# SPDX-License-Identifier: Apache-2.0
"""What is checked: a built model with the runner's step, a file, a module, a function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from vllm.compilation.graph_safety.report import Report, make_report
from vllm.compilation.graph_safety.scan import Scan
from vllm.compilation.graph_safety.values import Instance, Known
from vllm.compilation.graph_safety.walker import Arguments, Mode
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

Progress = Callable[[str], None]
_PACKAGE = "vllm"
_ENTRIES = ("forward", "compute_logits")
#: what a runner calls of a connector in a step, and what layers call, between graphs
_OF_STEPS = (
    *("bind_connector_metadata", "handle_preemptions", "will_read_recurrent_state"),
    *("start_load_kv", "wait_for_save", "get_finished", "get_blocks_with_load_errors"),
    *("get_block_ids_with_load_errors", "take_failed_requests", "get_kv_connector_stats"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
    "clear_connector_metadata",
)
_OF_LAYERS = ("wait_for_layer_load", "save_kv_layer")


def _quiet(name: str) -> None:
    """No progress is shown."""


def check_model(config: VllmConfig, progress: Progress = _quiet) -> Report:
    """A model with its drafters (each pipeline stage of it, where there are several), built without
    weights, its connector, and a step of the runner around them.

    Raises ValueError as `models_on_meta` does.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.model_outline import models_on_meta
    from vllm.v1 import spec_decode
    from vllm.v1.worker.model_runner import ModelRunner

    for found in pkgutil.iter_modules(spec_decode.__path__):
        # The runner may call any drafter, and the pass sees the classes that are loaded.
        importlib.import_module(f"{spec_decode.__name__}.{found.name}")
    parallel = config.parallel_config
    stages = parallel.pipeline_parallel_size
    models = [
        model
        for stage in (range(stages) if stages > 1 else (None,))
        for model in models_on_meta(config, parallel.tensor_parallel_size, stage)[1]
    ]
    scan = Scan(_packages(*models), progress)
    for model in models:
        _walk_module(scan, model)
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        _walk_connector(scan, KVConnectorFactory.get_connector_class(transfer))
    step = inspect.unwrap(ModelRunner._step)
    scan.run(step, Instance(ModelRunner, exact=True), Arguments(), Mode.STEP)
    assert config.model_config is not None
    return make_report(config.model_config.model, scan)


def check_connector(cls: type[KVConnectorBase_V1], progress: Progress = _quiet) -> Report:
    """What a step calls of a connector, on the worker's side."""
    scan = Scan((_PACKAGE, _package(cls)), progress)
    _walk_connector(scan, cls)
    return make_report(cls.__qualname__, scan)


def check_object(target: object, progress: Progress = _quiet) -> Report:
    """A module (built or its class), or a function: everything it reaches in its own package and in
    this one. Raises VLLMValidationError for anything else, and for a class without `forward`."""
    if isinstance(target, nn.Module):
        scan = Scan(_packages(target), progress)
        _walk_built(scan, target)
        return make_report(type(target).__qualname__, scan)
    if inspect.isfunction(target) or (isinstance(target, type) and issubclass(target, nn.Module)):
        scan = Scan((_PACKAGE, _package(target)), progress)
        _walk_target(scan, target)
        return make_report(target.__qualname__, scan)
    raise VLLMValidationError(
        f"{target!r} is neither a module, a class of modules nor a function", "graph-check"
    )


def check_file(path: Path, progress: Progress = _quiet) -> Report:
    """All classes of modules and all functions with tensors among their parameters that a file
    defines. The file is imported. `FILE:NAME` checks one of them.

    Raises VLLMValidationError where the file cannot be imported or has nothing to check.
    """
    name = path.name.partition(":")[2]
    path = path.with_name(path.name.partition(":")[0])
    module = _imported(path)
    scan = Scan((_PACKAGE, module.__name__), progress)
    targets = dict(_targets(module))
    if name and name not in targets:
        raise VLLMValidationError(
            f"{path} defines no module or function {name!r}; it has {', '.join(targets) or 'none'}",
            "graph-check",
        )
    if not targets:
        raise VLLMValidationError(
            f"{path} defines neither modules with a forward() nor functions of tensors; "
            "methods that a module elsewhere calls are checked with it: give its file, or a model",
            "graph-check",
        )
    for target in [targets[name]] if name else targets.values():
        _walk_target(scan, target)
    return make_report(str(path), scan)


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise VLLMValidationError(f"there is no file {path}", "graph-check")
    name = f"checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        what = f"{type(error).__name__}: {error}"
        raise VLLMValidationError(f"{path} cannot be imported: {what}", "graph-check") from error
    return module


def _targets(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(module).items():
        defined = isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__
        if not defined:
            continue
        if isinstance(thing, type) and issubclass(thing, nn.Module):
            if "forward" in vars(thing):
                yield name, thing
        elif isinstance(thing, FunctionType) and _takes_tensors(thing):
            yield name, thing


def _takes_tensors(function: FunctionType) -> bool:
    annotations = inspect.unwrap(function).__annotations__
    return any("Tensor" in str(v) for name, v in annotations.items() if name != "return")


def _package(target: type | FunctionType) -> str:
    module = target.__module__
    package = module.partition(".")[0]
    return module if package in ("torch", "tests", "__main__") else package


def _packages(*modules: nn.Module) -> tuple[str, ...]:
    """Of all classes that the modules are made of."""
    classes = {type(part) for module in modules for part in module.modules()}
    own = {_package(cls) for cls in classes if not cls.__module__.startswith("torch.")}
    return tuple(sorted(own | {_PACKAGE}))


def _walk_built(scan: Scan, module: nn.Module) -> None:
    """A module, or what a container of torch's holds."""
    if not scan.in_scope(type(module).__module__):
        for child in module.children():
            _walk_built(scan, child)
    else:
        _walk_module(scan, module)


def _walk_module(scan: Scan, module: nn.Module) -> None:
    for name in _ENTRIES:
        function = inspect.getattr_static(type(module), name, None)
        if isinstance(function, FunctionType):
            scan.run(function, Known(module), Arguments(), Mode.CAPTURED)


def _walk_connector(scan: Scan, cls: type[KVConnectorBase_V1]) -> None:
    for names, mode in ((_OF_STEPS, Mode.STEP), (_OF_LAYERS, Mode.BREAK)):
        for name in names:
            function = inspect.getattr_static(cls, name)
            assert isinstance(function, FunctionType)
            scan.run(inspect.unwrap(function), Instance(cls, exact=True), Arguments(), mode)


def _walk_target(scan: Scan, target: type | FunctionType) -> None:
    """A class of modules, or a function."""
    if isinstance(target, FunctionType):
        scan.run(target, None, Arguments(), Mode.CAPTURED)
        return
    function = inspect.getattr_static(target, "forward", None)
    if not isinstance(function, FunctionType) or function is nn.Module.forward:
        raise VLLMValidationError(f"{target.__qualname__} has no forward()", "graph-check")
    scan.run(function, Instance(target, exact=True), Arguments(), Mode.CAPTURED)
