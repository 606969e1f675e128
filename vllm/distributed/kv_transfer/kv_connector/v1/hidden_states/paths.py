# SPDX-License-Identifier: Apache-2.0
"""Which file a request's hidden states go to: always one below the storage directory."""

import os
from typing import Any

#: names of the server's own below the storage directory
INCOMPLETE = ".incomplete-"
LOCK_SUFFIX = ".lock"

_MAX_NAME_BYTES = 255 - len(LOCK_SUFFIX)
#: leaves room for the directory in which an incomplete file lies
_MAX_PATH_BYTES = 3800
_MAX_STEM_LENGTH = 200


class PathRefused(ValueError):
    """A client asked for a file that it may not have; the message is for the client."""


def default_path(storage_path: str, req_id: str) -> str:
    """`<storage_path>/<req_id>.safetensors`; PathRefused if no file can be called so."""
    well_formed = req_id.isprintable() and req_id not in ("", ".", "..")
    if not well_formed or "/" in req_id or len(req_id) > _MAX_STEM_LENGTH:
        raise PathRefused(f"request id {req_id!r} cannot be a file name")
    return os.path.join(storage_path, f"{req_id}.safetensors")


def custom_path(storage_path: str, asked: object) -> str:
    """The absolute path that a request's `hidden_states_path` means.

    Relative paths start at `storage_path`. PathRefused for what is not below it, for names that the
    server needs itself, and for what is no file name at all. Looks at the text only: links are for
    `Storage` to find.
    """
    if not isinstance(asked, (str, os.PathLike)):
        raise PathRefused(f"hidden_states_path must be a path, got {type(asked).__name__}")
    text = os.fsdecode(asked)
    if not text or not text.isprintable() or text.endswith("/"):
        raise PathRefused(f"hidden_states_path {text!r} is no file path")
    parts = text.split("/")
    path = os.path.normpath(os.path.join(storage_path, text))
    if ".." in parts or not path.startswith(os.path.join(storage_path, "")):
        raise PathRefused(f"hidden_states_path {text!r} is not below {storage_path}")
    if any(part.startswith(INCOMPLETE) for part in parts) or text.endswith(LOCK_SUFFIX):
        raise PathRefused(f"hidden_states_path {text!r} is a name that the server itself uses")
    too_long = any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in parts)
    if too_long or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise PathRefused("hidden_states_path is too long")
    return path


def check_params(
    storage_path: str, allow_custom_path: bool, params: dict[str, Any], num_completions: int
) -> None:
    """PathRefused or ValueError for `kv_transfer_params` that cannot be honoured."""
    if not isinstance(params.get("include_output_tokens", False), bool):
        raise ValueError("include_output_tokens must be true or false")
    asked = params.get("hidden_states_path")
    if asked is None or not allow_custom_path:
        return
    custom_path(storage_path, asked)
    if num_completions > 1:
        raise PathRefused(
            f"hidden_states_path names one file for {num_completions} completions; send n requests"
        )
