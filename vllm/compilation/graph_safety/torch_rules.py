# SPDX-License-Identifier: Apache-2.0
"""Which functions and methods of torch are hazards, and what the others give."""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch
import torch.nn.functional as F

#: methods and functions that read the device
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "equal", "allclose",
         "is_nonzero", "__index__"}  # fmt: skip
#: results whose shape depends on data
DATA_SIZED = {"nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere"}
#: of these an object of unknown type may only be a tensor
TENSORS_ALONE = {"item", "cpu", "numpy", "masked_select", "bincount"}
FACTORIES = {
    "zeros", "ones", "empty", "full", "arange", "range", "linspace", "eye", "rand", "randn",
    "randint", "empty_strided", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "clone", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
FROM_HOST = {"tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor", "new_tensor"}
CONVERSIONS = {"float", "half", "bfloat16", "double", "to", "type", "type_as"}
SEVERAL = {
    "split", "chunk", "unbind", "tensor_split", "topk", "sort", "split_with_sizes",
    "broadcast_tensors", "meshgrid", "aminmax", "cummax", "cummin", "kthvalue", "mode", "hsplit",
    "vsplit",
}  # fmt: skip
HOST_METHODS = {
    "dim", "numel", "nelement", "stride", "element_size", "data_ptr", "is_contiguous", "get_device",
    "storage_offset", "is_floating_point", "is_complex", "untyped_storage", "record_stream",
    "is_pinned", "is_tensor", "finfo", "iinfo", "ndimension",
}  # fmt: skip
TRUTHS = {
    "eq", "ne", "gt", "ge", "lt", "le", "greater", "less", "isnan", "isinf", "isfinite", "isin",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bool", "any", "all", "signbit",
    "greater_equal", "less_equal", "not_equal",
}  # fmt: skip
EXPANDS = {"expand", "expand_as", "broadcast_to"}
SAMPLES = {"argmax", "multinomial"}
#: views, and what else keeps what is known of a tensor
KEEPS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t",
    "contiguous", "detach", "expand", "expand_as", "narrow", "index_select", "clone", "to",
    "pin_memory", "movedim", "roll", "flip", "long", "int",
}  # fmt: skip

_NAMES: dict[int, str] = {
    id(thing): name
    for namespace in (torch, F, torch.linalg, torch.Tensor)
    for name, thing in vars(namespace).items()
    if callable(thing)
    and not isinstance(thing, types.ModuleType)
    and not name.startswith("_")
    and id(thing) not in set(map(id, vars(builtins).values()))
}
_NAMES |= {
    id(thing): f"cuda.{name}"
    for name, thing in vars(torch.cuda).items()
    if isinstance(thing, types.FunctionType | type) and thing.__module__.startswith("torch.cuda")
}


def torch_name(thing: Any) -> str | None:
    """`zeros` of `torch.zeros`, `cuda.synchronize` of torch.cuda's; None: not torch's."""
    name = _NAMES.get(id(thing))
    if name is not None:
        return name
    module = thing.__module__ if isinstance(thing, type | types.FunctionType) else None
    inside = isinstance(module, str) and (module == "torch" or module.startswith("torch."))
    if inside or isinstance(thing, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return str(thing.__name__)
    return None
