# SPDX-License-Identifier: Apache-2.0
"""The path of a request as the routes see it."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The request's path below the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path
