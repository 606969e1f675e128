# SPDX-License-Identifier: Apache-2.0
"""Calls of torch and launches of kernels: what they give, and their hazards."""

from __future__ import annotations

import ast

import torch
from triton.runtime.autotuner import Autotuner

from vllm.compilation.graph_safety import torch_rules as rules
from vllm.compilation.graph_safety.early_starts import check_launch
from vllm.compilation.graph_safety.members import shape_of
from vllm.compilation.graph_safety.values import (
    NO_TAGS,
    UNKNOWN,
    Array,
    Host,
    Instance,
    Items,
    Known,
    Launch,
    Value,
    is_array,
    join_all,
    tags_of,
)
from vllm.compilation.graph_safety.walker import Arguments, Body, Mode

_TRUTH = frozenset({"bool"})
_DEVICE = Host(frozenset({"device"}))
_SIZED = Array(frozenset({"sized"}))


def call_tensor_method(
    body: Body, receiver: Array, name: str, args: Arguments, node: ast.Call
) -> Value:
    """`receiver.name(...)`."""
    on_host = "cpu" in receiver.tags
    if name in rules.READS and not on_host:
        sampled = name in ("item", "tolist") and "sampled" in receiver.tags
        body.report(12 if sampled else 1, node, f".{name}() reads a device value")
        return Array(frozenset({"cpu"})) if name == "cpu" else _DEVICE
    if on_host and name in ("item", "tolist", "numpy"):
        return Host()
    if name in ("size", "numel", "nelement"):
        return _size(receiver, name, args)
    if name in rules.HOST_METHODS:
        return Host()
    if name in ("to", "cuda"):
        return _moved(body, receiver, name, args, node)
    if name in rules.CONVERSIONS and "weight" in receiver.tags:
        body.report(19, node, f".{name}() converts a weight")
        return Array()
    return _result(body, name, Arguments((receiver, *args.positional), args.named), node)


def _size(receiver: Array, name: str, args: Arguments) -> Value:
    shape = shape_of(receiver)
    if name != "size":
        return shape.first[0]
    # Which dimension is asked for is not known here, and the first varies.
    return shape.first[0] if args.positional or args.named else shape


def _moved(body: Body, receiver: Array, name: str, args: Arguments, node: ast.Call) -> Value:
    target = [a for a in (*node.args, *(k.value for k in node.keywords if k.arg == "device"))]
    words = [a.value for a in target if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    waits = not any(k.arg == "non_blocking" for k in node.keywords)
    if "cpu" in words:
        if waits and "cpu" not in receiver.tags:
            body.report(1, node, "a tensor is copied to the host")
        return Array(frozenset({"cpu"}))
    if name == "cuda" or any(word.startswith("cuda") for word in words):
        if waits or body.mode is not Mode.STEP:
            body.report(7, node, "a tensor is copied to the device")
        return Array()
    dtypes = [v for v in args.all() if isinstance(v, Known) and isinstance(v.object, torch.dtype)]
    converts = dtypes or any(isinstance(a, ast.Attribute) and a.attr == "dtype" for a in node.args)
    if converts and "weight" in receiver.tags:
        body.report(19, node, ".to() converts a weight")
        return Array()
    if "cpu" in receiver.tags and not converts:
        if waits:
            body.report(7, node, "a host tensor is copied, and the host waits for it")
        return Array(receiver.tags - {"cpu"})
    truth = _TRUTH if any(v.object is torch.bool for v in dtypes) else NO_TAGS
    kept = receiver.tags if not converts else receiver.tags & {"sized", "expanded", "cpu"}
    return Array(kept | truth)


def unknown_method(
    body: Body, receiver: Value, name: str, args: Arguments, node: ast.Call
) -> Value:
    """A method of an object of which nothing is known, or of a library."""
    if name == "synchronize":
        body.report(14, node, ".synchronize() waits for the device")
        return Host()
    if name in ("plan", "begin_forward") and body.mode in (Mode.CAPTURED, Mode.BREAK, Mode.OP):
        body.report(23, node, f".{name}() of a library runs in the step")
        return UNKNOWN
    if isinstance(receiver, Known):
        return UNKNOWN
    if name in rules.TENSORS_ALONE and not isinstance(receiver, Instance):
        number = 2 if name in rules.DATA_SIZED else 1
        body.report(number, node, f".{name}() reads a device value")
        return _SIZED if number == 2 else _DEVICE
    return UNKNOWN


def call_torch(body: Body, function: object, name: str, args: Arguments, node: ast.Call) -> Value:
    """`torch.name(...)`, of any of its namespaces."""
    if name == "cuda.synchronize":
        body.report(14, node, "the host waits for the device")
        return Host()
    if name == "cuda.graph":
        if args.get("stream") is None:
            body.report(13, node, "a capture without a stream of its own")
        return UNKNOWN
    if name == "cuda.set_device":
        body.report(13, node, "the current device changes inside a step")
        return UNKNOWN
    if name == "cuda.empty_cache":
        body.report(6, node, "memory goes back to the device, and the next step allocates anew")
        return UNKNOWN
    if name == "compile":
        body.report(25, node, "torch.compile inside a step")
        return UNKNOWN
    if isinstance(function, type):
        if function is torch.nn.Parameter:
            return Array(frozenset({"weight"}))
        if function is torch.nn.ModuleList and args.positional:
            return args.positional[0]
        if function is torch.nn.Sequential:
            return Items(args.positional)
        return Instance(function, exact=True)
    if name.startswith("cuda."):
        return UNKNOWN
    if name in rules.READS:
        body.report(1, node, f"torch.{name}() reads a device value")
        return _DEVICE
    if name == "where" and len(node.args) == 1 and not node.keywords:
        body.report(2, node, "torch.where with one argument is nonzero")
        return Items((), _SIZED)
    return _result(body, name, args, node)


def _result(body: Body, name: str, args: Arguments, node: ast.Call) -> Value:
    """Of a function, or a method whose receiver is the first argument."""
    first = args.positional[0] if args.positional else UNKNOWN
    if name in rules.DATA_SIZED:
        body.report(2, node, f"the shape of {name}()'s result depends on data")
        # With inverses or counts it is several tensors.
        several = {"return_inverse", "return_counts"} & {k.arg for k in node.keywords}
        return Items((), _SIZED) if several else _SIZED
    if name == "repeat_interleave" and not args.get("output_size"):
        if len(args.positional) > 1 and is_array(args.positional[1]):
            body.report(2, node, "repeat_interleave() without output_size reads the repeats")
            return _SIZED
    if name in rules.FROM_HOST:
        return _from_host(body, name, args, node)
    if name in rules.FACTORIES:
        _check_factory(body, name, args, node)
        if args.get("pin_memory") is not None:
            return Array(frozenset({"cpu"}))
        boolean = isinstance(d := args.get("dtype"), Known) and d.object is torch.bool
        same = name == "clone" or (name.endswith("_like") and args.get("dtype") is None)
        return Array(_TRUTH if boolean or (same and "bool" in tags_of(first)) else NO_TAGS)
    if name in rules.HOST_METHODS or name.startswith("is_"):
        return Host()
    if name in rules.SEVERAL or (name in ("max", "min", "median") and _along(args)):
        return Items((), Array(tags_of(first) & {"bool", "sized"}))
    if name in rules.TRUTHS:
        return Array(_TRUTH)
    if name in rules.SAMPLES:
        return Array(frozenset({"sampled"}))
    if name in ("cat", "concat", "concatenate", "hstack", "vstack"):
        return Array(frozenset({"joined"}))
    tags = tags_of(first) & {"bool", "sized", "sampled"} if name in rules.KEEPS else NO_TAGS
    if name in rules.EXPANDS:
        tags |= {"expanded"}
    arrays = [v for v in args.all() if isinstance(v, Array)]
    on_host = bool(arrays) and not any(map(is_array, arrays))
    return Array(tags | (frozenset({"cpu"}) if on_host else NO_TAGS))


def _along(args: Arguments) -> bool:
    """Whether a reduction is along a dimension, and so gives values and indices."""
    along = args.get("dim") is not None
    return along or (len(args.positional) > 1 and not is_array(args.positional[1]))


def _from_host(body: Body, name: str, args: Arguments, node: ast.Call) -> Value:
    first = args.positional[0] if args.positional else UNKNOWN
    if name in ("as_tensor", "asarray") and is_array(first):
        return first
    device = args.get("device") is not None or name == "new_tensor"
    if body.mode is not Mode.STEP or device:
        body.report(7, node, f"{name}() copies from the host's pageable memory")
        return Array()
    return Array(frozenset({"cpu"}))


def _check_factory(body: Body, name: str, args: Arguments, node: ast.Call) -> None:
    sizes = args.all() if name in ("zeros", "ones", "empty", "full", "arange") else []
    sizes = args.all()[1:] if name.startswith("new_") else sizes
    if "device" in tags_of(join_all(sizes)):
        body.report(10, node, f"{name}() makes a tensor as large as a device value says")
    elif body.mode is Mode.BREAK and args.get("out") is None:
        body.report(6, node, f"{name}() allocates in an eager break")


def call_launch(body: Body, launch: Launch, args: Arguments, node: ast.Call) -> Value:
    """`kernel[grid](...)`."""
    check_launch(body, launch.kernel, node)
    if isinstance(launch.kernel, Autotuner):
        body.report(25, node, "an autotuned kernel times its variants at the first launch of each")
    for keyword in node.keywords:
        if keyword.arg is not None and (v := args.get(keyword.arg)) is not None:
            if isinstance(v, Host) and v.tags & {"batch", "device"}:
                message = f"the constant {keyword.arg} depends on the batch: a kernel for each size"
                body.report(25, keyword.value, message)
    for arg, value in zip(node.args, args.positional, strict=False):
        if "expanded" in tags_of(value):
            body.report(18, arg, "a kernel is given a view with stride 0")
    return UNKNOWN
