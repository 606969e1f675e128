# SPDX-License-Identifier: Apache-2.0
"""What calls give, and the hazards in them."""

from __future__ import annotations

import ast
import functools
import logging
import typing
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from vllm.compilation.graph_safety.annotations import annotated
from vllm.compilation.graph_safety.torch_calls import (
    call_launch,
    call_tensor_method,
    call_torch,
    unknown_method,
)
from vllm.compilation.graph_safety.torch_rules import torch_name
from vllm.compilation.graph_safety.values import (
    UNKNOWN,
    Array,
    Capturing,
    Either,
    Host,
    Instance,
    Items,
    Known,
    Launch,
    Local,
    Member,
    Method,
    SuperOf,
    Value,
    analysed_kernels,
    distinct,
    is_array,
    join_all,
    of_object,
    options,
    tags_of,
)
from vllm.compilation.graph_safety.walker import Arguments, Body, Mode
from vllm.compilation.monitor import is_capturing
from vllm.kernels.registry import ComposedOp, Implementation, Op

_CASTS = {int, float, bool, complex}
_ROWS = {list, tuple, set, sum, min, max, sorted, any, all, map, filter}
_TEXT = {str, repr, print, format, ascii}


def call(body: Body, node: ast.Call) -> Value:
    """The value of a call; its arguments first."""
    if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
        return _super(body)
    callee = body.value(node.func)
    positional: list[Value] = []
    rest: Value | None = None
    for arg in node.args:
        value = body.value(arg)
        if not isinstance(arg, ast.Starred):
            positional.append(value)
        elif isinstance(value, Items) and value.each == UNKNOWN:
            positional += value.first
        else:
            rest = value.any() if isinstance(value, Items) else value
    named = [(k.arg, body.value(k.value)) for k in node.keywords if k.arg is not None]
    for keyword in node.keywords:
        if keyword.arg is None:
            body.value(keyword.value)
    return call_value(body, callee, Arguments(tuple(positional), tuple(named), rest), node)


def _super(body: Body) -> Value:
    receiver = body.variables.get("self", body.variables.get("cls", UNKNOWN))
    cls = body.variables.get("__class__", UNKNOWN)
    if not isinstance(cls, Known):
        return UNKNOWN
    kind = receiver.cls if isinstance(receiver, Instance) else None
    if isinstance(receiver, Known):
        thing = receiver.object
        kind = thing if isinstance(thing, type) else type(thing)
    if kind is None or cls.object not in kind.__mro__:
        return UNKNOWN
    following = kind.__mro__[kind.__mro__.index(cls.object) + 1 :]
    return SuperOf(following, receiver)


def call_value(body: Body, callee: Value, args: Arguments, node: ast.Call) -> Value:
    """The value of `callee(*args)`."""
    return join_all([_call_one(body, option, args, node) for option in options(callee)])


def _call_one(body: Body, callee: Value, args: Arguments, node: ast.Call) -> Value:
    match callee:
        case Launch():
            return call_launch(body, callee, args, node)
        case Local():
            return body.call_local(callee, args.positional)
        case Method():
            return _call_function(body, callee.function, callee.receiver, args, node)
        case Member():
            return _call_member(body, callee, args, node)
        case Instance():
            return _call_instance(body, callee, args, node)
        case Known():
            return _call_known(body, callee.object, args, node)
        case Items():
            # Modules one after the other, as in nn.Sequential.
            for module in callee.first or (callee.each,):
                call_value(body, module, args, node)
            return Array()
    return UNKNOWN


def _call_member(body: Body, callee: Member, args: Arguments, node: ast.Call) -> Value:
    receiver, name = callee.receiver, callee.name
    if isinstance(receiver, SuperOf):
        return call_value(body, receiver.method(name), args, node)
    if isinstance(receiver, Array):
        return call_tensor_method(body, receiver, name, args, node)
    if isinstance(receiver, Items):
        return _call_items(body, receiver, name, args, node)
    if isinstance(receiver, Host):
        if any(map(is_array, args.all())) and name == "format":
            body.report(1, node, "a tensor is formatted")
        return Host(receiver.tags & {"device"})
    return unknown_method(body, receiver, name, args, node)


def _call_items(body: Body, items: Items, name: str, args: Arguments, node: ast.Call) -> Value:
    if name in ("append", "extend", "insert", "update", "add", "setdefault"):
        assert isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name):
            added = [v.any() if isinstance(v, Items) else v for v in args.all()]
            grown = Items((), join_all([items.any(), *added]))
            body.variables[node.func.value.id] = grown
        return UNKNOWN
    if name == "items":
        return Items((), Items((Host(), items.any())))
    if name in ("keys", "index", "count"):
        return Host()
    return items if name in ("values", "copy") else items.any()


def _call_instance(body: Body, callee: Instance, args: Arguments, node: ast.Call) -> Value:
    name = "forward" if issubclass(callee.cls, nn.Module) else "__call__"
    if issubclass(callee.cls, nn.Module) and not body.walker.in_scope(callee.cls.__module__):
        return UNKNOWN if callee.cls is nn.Module else Array()
    method = body.attribute(callee, name)
    return call_value(body, method, args, node) if not isinstance(method, Member) else UNKNOWN


def _call_known(body: Body, thing: Any, args: Arguments, node: ast.Call) -> Value:
    if isinstance(thing, functools.partial):
        bound = tuple(of_object(arg) for arg in thing.args)
        named = tuple((name, of_object(value)) for name, value in thing.keywords.items())
        merged = Arguments((*bound, *args.positional), (*named, *args.named), args.rest)
        return _call_known(body, thing.func, merged, node)
    if isinstance(thing, Op):
        return _call_op(body, thing, args, node)
    if isinstance(thing, nn.Module):
        if not body.walker.in_scope(type(thing).__module__):
            for child in distinct(list(thing.children())):
                call_value(body, child, args, node)
            return Array()
        return call_value(body, body.attribute(Known(thing), "forward"), args, node)
    name = torch_name(thing)
    if name is not None:
        return call_torch(body, thing, name, args, node)
    if isinstance(thing, type):
        return _call_type(body, thing, args, node)
    if isinstance(thing, MethodType):
        receiver = thing.__self__
        if isinstance(receiver, logging.Logger) and any(map(is_array, args.all())):
            body.report(1, node, "a tensor is logged")
        return _call_function(body, thing.__func__, of_object(receiver), args, node)
    if isinstance(thing, functools._lru_cache_wrapper):
        # Runs once for its arguments, not in every step.
        return _declared(thing.__wrapped__)
    if thing is is_capturing:
        return Capturing(True) if body.mode is Mode.CAPTURED else Host()
    if isinstance(thing, FunctionType):
        return _call_function(body, thing, None, args, node)
    return _call_foreign(body, thing, args, node)


def _declared(function: Any) -> Value:
    if not isinstance(function, FunctionType):
        return UNKNOWN
    given = function.__annotations__.get("return")
    return annotated(given, function.__globals__, function.__module__)


def _call_function(
    body: Body, function: Any, receiver: Value | None, args: Arguments, node: ast.Call
) -> Value:
    if function is typing.cast and len(args.positional) == 2:
        to, value = args.positional
        if value != UNKNOWN and not isinstance(value, Instance):
            return value
        return Instance(to.object) if isinstance(to, Known) and isinstance(to.object, type) else to
    if function in (nn.Module.register_buffer, nn.Module.register_parameter):
        named = node.args[0] if node.args else None
        if isinstance(named, ast.Constant) and len(args.positional) > 1:
            body.given[str(named.value)] = args.positional[1]
        return UNKNOWN
    module = function.__module__ if isinstance(function, FunctionType) else ""
    if body.walker.in_scope(module or ""):
        return body.walker.run(function, receiver, args, body.mode)
    if receiver is not None and isinstance(function, FunctionType):
        return unknown_method(body, receiver, function.__name__, args, node)
    name = torch_name(function)
    if name is not None:
        return call_torch(body, function, name, args, node)
    return _call_foreign(body, function, args, node)


def _call_op(body: Body, op: Op[Any, Any], args: Arguments, node: ast.Call) -> Value:
    results = []
    implementations: list[Implementation[Any, Any]] = op.implementations("cuda")
    before, body.mode = body.mode, Mode.BUILD if body.mode is Mode.BUILD else Mode.OP
    for one in implementations:
        for function in (one.run, one.takes):
            if function is not None:
                results.append(_call_known(body, function, args, node))
    body.mode = before
    if isinstance(op, ComposedOp):
        kernels = Known(analysed_kernels())
        inner = Arguments((kernels, *args.positional), args.named, args.rest)
        results.append(_call_known(body, op.composition, inner, node))
    reference = _declared(op.composition if isinstance(op, ComposedOp) else op.reference)
    return reference if reference != UNKNOWN else join_all(results)


def _call_type(body: Body, cls: type, args: Arguments, node: ast.Call) -> Value:
    values = args.all()
    if cls in _CASTS:
        if any(is_array(v) and not isinstance(v, Items) for v in values):
            sampled = "sampled" in tags_of(join_all(values))
            body.report(12 if sampled else 1, node, f"{cls.__name__}() reads a device value")
            return Host(frozenset({"device"}))
        tags = tags_of(join_all(values)) & {"device", "batch"}
        return Host(tags - {"batch"} if cls is bool else tags)
    if cls in _TEXT:
        return _text(body, args, node)
    if cls in _ROWS:
        return _rows(body, cls, args, node)
    if cls is dict:
        return Items((), join_all(v.any() for v in values if isinstance(v, Items)))
    if cls in (range, enumerate, zip, reversed):
        return _iterator(body, cls, values)
    if issubclass(cls, Enum | BaseException) or cls is TypeVar:
        return Instance(cls)
    if cls.__module__.partition(".")[0] == "numpy":
        return _numpy(body, args, node)
    if not body.walker.in_scope(cls.__module__):
        return Host() if cls in (torch.Size, slice) else Instance(cls, exact=True)
    return body.walker.made(cls, args, body.mode)


def _iterator(body: Body, cls: type, values: list[Value]) -> Value:
    if cls is range:
        return Items((), Host(tags_of(join_all(values)) & {"device"}))
    parts: list[Value] = []
    for value in values:
        if is_array(value) and not isinstance(value, Items):
            return value
        if "device" in tags_of(value):
            return Items((), Host(frozenset({"device"})))
        known = value.object if isinstance(value, Known) else None
        parts.append(Either(tuple(_each(known))) if _each(known) else _any(value))
    if cls is enumerate:
        return Items((), Items((Host(), *parts[:1])))
    return Items((), Items(tuple(parts))) if cls is zip else Items((), join_all(parts))


def _each(thing: Any) -> list[Value]:
    return [] if thing is None else distinct(thing)


def _any(value: Value) -> Value:
    return value.any() if isinstance(value, Items) else UNKNOWN


def _text(body: Body, args: Arguments, node: ast.Call) -> Value:
    if any(map(is_array, args.all())):
        body.report(1, node, "a tensor is printed")
    return Host()


def _rows(body: Body, function: Any, args: Arguments, node: ast.Call) -> Value:
    values = args.all()
    arrays = [v for v in values if is_array(v) and not isinstance(v, Items)]
    if arrays and function not in (map, filter):
        chooses = function in (any, all, min, max, sorted)
        body.report(5 if chooses else 3, node, f"{function.__name__}() reads a tensor row by row")
        return Host(frozenset({"device"})) if function in (any, all) else join_all(arrays)
    tags = tags_of(join_all(values)) & {"device", "batch"}
    if function in (any, all):
        return Host(tags & {"device"})
    if function in (sum, min, max):
        insides = [v.any() if isinstance(v, Items) else v for v in values]
        if any(isinstance(v, Array) for v in insides):
            return join_all(insides)
        return Host(tags)
    if function in (map, filter):
        return Items()
    if function is sorted:
        return Items((), join_all(_any(v) for v in values))
    if len(values) == 1 and isinstance(values[0], Items):
        return values[0]
    return Items((), Host(tags)) if tags else Items()


def _numpy(body: Body, args: Arguments, node: ast.Call) -> Value:
    if any(map(is_array, args.all())):
        body.report(1, node, "numpy reads a device value")
        return Host(frozenset({"device"}))
    return Host()


def _call_foreign(body: Body, thing: Any, args: Arguments, node: ast.Call) -> Value:
    values = args.all()
    if thing is len:
        value = values[0] if values else UNKNOWN
        if isinstance(value, Array):
            shape = body.attribute(value, "shape")
            assert isinstance(shape, Items)
            return shape.first[0]
        return Host(tags_of(value) & {"device"} if not is_array(value) else frozenset())
    if thing in _TEXT_FUNCTIONS:
        return _text(body, args, node)
    if thing in _ROW_FUNCTIONS:
        return _rows(body, thing, args, node)
    if thing is next and values:
        return _any(values[0])
    if thing is iter and values:
        return values[0]
    if thing in (isinstance, issubclass, hasattr, callable, id, hash, type):
        return Host()
    if isinstance(thing, np.ufunc) or _module(thing).partition(".")[0] == "numpy":
        return _numpy(body, args, node)
    if _module(thing) in ("math", "operator", "builtins", "time"):
        if any(is_array(v) and not isinstance(v, Items) for v in values):
            body.report(1, node, f"{thing.__name__}() reads a device value")
        return Host(tags_of(join_all(values)) & {"device", "batch"})
    return UNKNOWN


_TEXT_FUNCTIONS = (print, repr, format, ascii)
_ROW_FUNCTIONS = (sum, min, max, sorted, any, all)


def _module(thing: Any) -> str:
    known = isinstance(thing, FunctionType | type(len) | type)
    return (thing.__module__ or "") if known else ""
