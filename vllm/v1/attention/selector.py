# SPDX-License-Identifier: Apache-2.0
"""Which attention backend a layer uses: asked for, or chosen and recorded."""

from __future__ import annotations

import importlib.util

import torch

from vllm import decisions
from vllm.config import get_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.utils.class_registry import resolve_class
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.latent import LatentAttentionBackend
from vllm.v1.attention.backends.paged import PagedAttentionBackend
from vllm.v1.attention.interface_check import check_implementation
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum

_NAMES = ("PAGED", "FLASHINFER")


def get_attn_backend(
    head_size: int, dtype: torch.dtype, own: type[AttentionBackend] | None = None
) -> type[AttentionBackend]:
    """The paged-attention backend of this run for heads of `head_size` kept as `dtype`, or the
    layer's `own`.

    Raises ValueError for a name that is unknown, a class that is no such backend, and one that
    cannot run here or with what is configured.
    """
    config = get_current_vllm_config()
    backend = own or _backend_of(config.attention_backend, head_size, dtype)
    check_implementation(backend)
    if config.drafter is not None and backend.plans_on_host:
        raise VLLMValidationError(
            f"the attention backend {backend.name} plans its work on the host, which does not know "
            "how many draft tokens were accepted, so it cannot run with a drafter "
            "(--speculative-config); use PAGED"
        )
    return backend


def _backend_of(asked: str | None, head_size: int, dtype: torch.dtype) -> type[AttentionBackend]:
    if asked is None:
        decisions.record("attention backend", "PAGED", "own kernels need no run-time compilation")
        return PagedAttentionBackend
    if "." in asked:
        try:
            return resolve_class(asked)
        except VLLMValidationError as error:
            raise VLLMValidationError(
                f"--attention-backend: {error}; name the folder of its package in PYTHONPATH"
            ) from error
    name = asked.upper()
    if name == "PAGED":
        return PagedAttentionBackend
    if name == "FLASHINFER":
        if not current_platform.is_cuda():
            raise VLLMValidationError(
                "--attention-backend FLASHINFER needs a CUDA device; use PAGED"
            )
        if importlib.util.find_spec("flashinfer") is None:
            raise VLLMValidationError(
                "--attention-backend FLASHINFER needs the flashinfer-python package; "
                "install vllm[cuda] or use PAGED"
            )
        if head_size not in (64, 128, 256) or dtype not in (torch.float16, torch.bfloat16):
            raise VLLMValidationError(
                f"--attention-backend FLASHINFER supports 16-bit heads of 64, 128 or 256, not "
                f"{dtype} heads of {head_size}; use PAGED"
            )
        from vllm.v1.attention.backends.flashinfer import FlashInferBackend

        return FlashInferBackend
    raise VLLMValidationError(
        f"--attention-backend {asked} is unknown; choose from {', '.join(_NAMES)}, or name a class "
        "of your own as package.module.Class"
    )


def get_latent_attn_backend() -> type[AttentionBackend]:
    """The backend of multi-head latent attention; ValueError if another was asked for."""
    asked = get_current_vllm_config().attention_backend
    if asked is not None and asked.upper() != "PAGED":
        raise VLLMValidationError(
            f"--attention-backend {asked} does not run latent attention; leave it out, or use PAGED"
        )
    decisions.record(
        "latent attention backend",
        LatentAttentionBackend.name,
        "own kernels need no run-time compilation and take any head size and draft width",
        instead_of="FlashMLA, FlashInfer",
    )
    return LatentAttentionBackend


def get_mamba_attn_backend(mamba_type: str) -> type[AttentionBackend]:
    """The backend of a recurrent layer kind (`MambaSpec.mamba_type`)."""
    kinds = MambaAttentionBackendEnum
    known = [kind.value for kind in (kinds.GDN_ATTN, kinds.KDA_ATTN, kinds.MAMBA1, kinds.MAMBA2)]
    if mamba_type in known:
        return GDNAttentionBackend
    raise VLLMValidationError(
        f"recurrent layers of type {mamba_type!r} are unknown; known: {', '.join(known)}"
    )
