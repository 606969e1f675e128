# SPDX-License-Identifier: Apache-2.0
"""Whether a backend class is what the engine calls: checked where a layer takes it, before a step
runs."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

_GUIDE = "docs/adding_a_backend.md has a complete one"
#: what the engine calls by position
_BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")
_BUILD = ("self", "common")
_IMPL = ("num_heads", "head_size", "scale", "num_kv_heads", "sliding_window")
_FORWARD = ("self", "query", "kv_cache", "metadata", "out", "gate")


@cache
def check_backend(backend: type[AttentionBackend]) -> None:
    """VLLMValidationError for a class without a name or a builder, with a declaration that there is
    not, or a builder that takes other arguments than the engine gives."""
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise VLLMValidationError(
            f"an attention backend is a class derived from AttentionBackend, not {backend!r}; "
            f"{_GUIDE}"
        )
    own = backend.__name__
    name = inspect.getattr_static(backend, "name", None)
    if not (isinstance(name, str) and name):
        raise VLLMValidationError(
            f'attention backend {own} has no `name`: set it in the class, as `name = "MINE"`'
        )
    _check_declarations(backend)
    builder = _class_from(backend, "get_builder_cls")
    if not issubclass(builder, AttentionMetadataBuilder):
        raise VLLMValidationError(
            f"attention backend {own}: {builder.__name__} does not derive from "
            "AttentionMetadataBuilder"
        )
    if builder.__abstractmethods__:
        raise VLLMValidationError(
            f"attention backend {own}: {builder.__name__} lacks "
            f"{', '.join(sorted(builder.__abstractmethods__))}"
        )
    _check_call(own, builder, builder, _BUILDER)
    _check_call(own, f"{builder.__name__}.build", builder.build, _BUILD)


@cache
def check_implementation(backend: type[AttentionBackend]) -> None:
    """As `check_backend`, for a backend whose implementation an `Attention` layer makes and
    calls."""
    check_backend(backend)
    own = backend.__name__
    impl = _class_from(backend, "get_impl_cls")
    _check_call(own, impl, impl, _IMPL)
    forward = inspect.getattr_static(impl, "forward", None)
    if not inspect.isfunction(forward):
        raise VLLMValidationError(
            f"attention backend {own}: {impl.__name__} has no method `forward`; it has to have "
            f"forward({', '.join(_FORWARD[1:])})"
        )
    _check_call(own, f"{impl.__name__}.forward", forward, _FORWARD)


def _check_declarations(backend: type[AttentionBackend]) -> None:
    """What a class says that it can do is known, and of the type that the interface has."""
    known = [n for n in AttentionBackend.__annotations__ if n != "name"]
    for name in dir(backend):
        if name.startswith("supports_") and name not in known:
            raise VLLMValidationError(
                f"attention backend {backend.__name__} declares {name}, which the engine does not "
                f"ask for; it asks for {', '.join(known)}"
            )
    for name in known:
        value = inspect.getattr_static(backend, name)
        if name == "max_prefills_in_graph":
            fits, wanted = value is None or type(value) is int, "an int or None"
        else:
            fits, wanted = isinstance(value, bool), "True or False"
        if not fits:
            raise VLLMValidationError(
                f"attention backend {backend.__name__}: {name} is {value!r}; it has to be {wanted}"
            )


def _class_from(backend: type[AttentionBackend], method: str) -> type[Any]:
    """What a static method of the backend says; its own, not the interface's."""
    own = backend.__name__
    found = inspect.getattr_static(backend, method)
    if found is inspect.getattr_static(AttentionBackend, method):
        raise VLLMValidationError(f"attention backend {own} lacks {method}; {_GUIDE}")
    function = getattr(backend, method)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise VLLMValidationError(
            f"attention backend {own}: {method} is a static method without parameters: write "
            "@staticmethod above it"
        ) from error
    result = function()
    if not isinstance(result, type):
        raise VLLMValidationError(
            f"attention backend {own}: {method} returned {result!r}; it has to return a class"
        )
    return result


def _check_call(own: str, what: type[Any] | str, function: Any, given: tuple[str, ...]) -> None:
    """That `function` takes as many arguments as are `given`, by position."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        called = what if isinstance(what, str) else f"{what.__name__}.__init__"
        wanted = ", ".join(name for name in given if name != "self")
        raise VLLMValidationError(
            f"attention backend {own}: {called} cannot be called with ({wanted}) by position: "
            f"{error}"
        ) from error
