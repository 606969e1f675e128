# SPDX-License-Identifier: Apache-2.0
"""Which item of the checklist a host read is: what the host does with the value says it."""

from __future__ import annotations

import ast

from vllm.compilation.graph_safety.hazards import hazard_of_branch
from vllm.compilation.graph_safety.simulator.spots import Spot, running_functions

#: ops that choose a token
_SAMPLERS = frozenset({"argmax", "argmax_rows", "draw_tokens", "multinomial"})
#: functions with which libraries plan
_PLANNERS = frozenset({"plan", "begin_forward"})
#: what has a test
_TESTING = ast.If | ast.While | ast.IfExp | ast.Assert


def read_hazard(spot: Spot, producer: str) -> int:
    """The number of a read at `spot` of what the op `producer` made."""
    if producer in _SAMPLERS:
        return 12
    if not _PLANNERS.isdisjoint(running_functions()):
        return 23
    inner: ast.AST | None = None
    around = spot.surroundings()
    if around and isinstance(around[0], ast.Subscript) and _has_bounds(around[0].slice):
        return 10
    for node in around:
        hazard = _hazard_in(node, inner)
        if hazard is not None:
            return hazard
        inner = node
    return 1


def _has_bounds(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice) for part in parts)


def _hazard_in(node: ast.AST, inner: ast.AST | None) -> int | None:
    """What reading `inner`, a part of `node`, does there; None where `node` does not tell. An
    instruction of `node` as a whole, without `inner`, is the jump after its test."""
    if isinstance(node, ast.Slice):
        return 10
    if isinstance(node, ast.For) and inner is node.iter:
        return 3
    if isinstance(node, ast.Subscript) and inner is node.slice:
        # An index that the host must know chooses a module or a list's element.
        return 3
    if isinstance(node, _TESTING) and (inner is None or inner is node.test):
        if isinstance(node, ast.While):
            return 11
        return hazard_of_branch(node) if isinstance(node, ast.If) else 5
    return 1 if isinstance(node, ast.stmt) else None


def stores_element(spot: Spot) -> bool:
    """Whether the call at `spot` is that of `tensor[index] = ...`."""
    for node in spot.surroundings():
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if any(isinstance(t, ast.Subscript) and isinstance(t.ctx, ast.Store) for t in targets):
            return True
    return False
