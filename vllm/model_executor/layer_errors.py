# SPDX-License-Identifier: Apache-2.0
"""Errors of layers say which layer they come from: a kernel that refuses its tensors knows none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Errors that are raised inside begin with the layer's dotted `name`."""
    try:
        yield
    except Exception as error:
        name_layer(error, name)
        raise


def name_layer(error: Exception, name: str) -> None:
    """Begin the error's message with `name`; nothing where it says that name or one below it
    already, or where it has no message of one argument."""
    message = error.args[0] if len(error.args) == 1 else None
    if name and isinstance(message, str) and name not in message:
        error.args = (f"{name}: {message}",)


def name_failing_module(error: Exception, model: nn.Module, prefix: str) -> None:
    """Begin the error's message with the path of the innermost module of `model` that was running
    when it was raised; `prefix`: what the model itself is called, "" for a target."""
    paths = {id(module): path for path, module in model.named_modules(prefix=prefix)}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    name_layer(error, found)
