# SPDX-License-Identifier: Apache-2.0
"""State memory: how much, in what blocks, and what is kept for reuse."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option

CacheDType = Literal["auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3"]
_GIB = 2**30


@config
class CacheConfig:
    """State memory of the model's layers."""

    block_size: Annotated[int, Field(gt=0, multiple_of=16)] = option(
        default=16, resolved=True, help="Tokens in a cache block; a multiple of 16."
    )
    block_sizes: dict[str, int] = option(
        default_factory=dict,
        help='Tokens in a block of some kinds of state, as JSON like {"sliding_window": 64}; '
        "multiples of --block-size, which the others have and prefixes are hashed in. Kinds: "
        "full_attention, sliding_window, mla_attention, hidden_states.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = option(
        default=0.92, help="Fraction of the GPU's memory the engine may use, in (0, 1]."
    )
    kv_cache_memory_bytes: PositiveInt | None = option(
        default=None,
        kind=FlagKind.HUMAN_INT,
        help="Bytes for state memory of each worker; overrides --gpu-memory-utilization.",
    )
    cache_dtype: CacheDType = option(
        default="auto",
        name="kv_cache_dtype",
        help="Dtype of keys and values; `auto` is the model's, `fp8` (`fp8_e4m3`) half of a 16-bit "
        "one (CUDA). Hidden states keep the model's.",
    )
    num_gpu_blocks_override: Annotated[int, Field(ge=2)] | None = option(
        default=None,
        help="Pages of the state arena, the null page included, instead of what fits in memory.",
    )
    enable_prefix_caching: bool = option(
        default=True,
        resolved=True,
        help="Reuse the state of common prefixes, recurrent state included.",
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = option(
        default="sha256", help="Hash of prefix blocks."
    )
    mamba_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        default="auto", help="Dtype of the convolution state; `auto` is the model's."
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = option(
        default="auto",
        help="Dtype of the recurrent state; `auto` is the checkpoint's choice, else float32.",
    )
    mamba_cache_mode: Literal["none", "align", "all"] = option(
        default="none",
        help="Checkpoints of recurrent state for the prefix cache besides those at exact token "
        "counts (ends of prompts and turns, learnt divergences, marks): `all` adds one every "
        "--mamba-block-size prompt tokens; `none` and `align` add nothing.",
    )
    mamba_block_size: PositiveInt | None = option(
        default=None,
        kind=FlagKind.HUMAN_INT,
        help="Prompt tokens between the checkpoints of --mamba-cache-mode=all; 1024 by default.",
    )
    deferred_commit_tokens: Annotated[int, Field(ge=1, le=16)] | None = option(
        default=None,
        resolved=True,
        help="Tokens a decoding request generates between two writes of its recurrent state, 1 to "
        "16 (1: a write per token). Results have the same bits. Default: chosen and recorded.",
    )
    recurrent_prefill_split: Literal["auto", "on", "off"] = option(
        default="auto",
        help="Scan the recurrent layers of long prompts in segments at the same time where one "
        "after another leaves most of the GPU idle. Results then differ within rounding with the "
        "batch and the steps; `auto` is on where prefix caching is off.",
    )
    sanitize: bool = option(
        default_factory=lambda: bool(envs.VLLM_SANITIZE),
        resolved=True,
        help="Check the use of state memory in every step: freed blocks are filled with NaN, block "
        "tables are compared with who owns what, and the first bad read or write ends the engine, "
        "naming request, group, block and token. Also switched on by VLLM_SANITIZE=1.",
    )
    kv_offloading_size: Annotated[float, Field(gt=0)] | None = option(
        default=None,
        help="GiB of host memory, over all workers together, that keep what the prefix cache has "
        "to give up. A short form of a --kv-transfer-config (docs/offloading.md).",
    )
    kv_offloading_backend: Literal["native", "lmcache"] = option(
        default="native",
        help="Who keeps it: `native` is OffloadingConnector, `lmcache` LMCacheMPConnector, whose "
        "own server has the memory. Takes effect with --kv-offloading-size.",
    )
    capture_live: Annotated[float, Field(gt=0, le=1)] | None = option(
        default=None,
        help="Share of the requests whose hidden states are stored for drafter training, of those "
        'that agree: `"kv_transfer_params": {"capture": true}` (docs/extraction.md).',
    )
    capture_live_path: str | None = option(
        default=None, help="Directory of what --capture-live stores; required with it."
    )
    capture_live_bytes: PositiveInt = option(
        default=10 * 2**30,
        kind=FlagKind.HUMAN_INT,
        help="Bytes that --capture-live may fill, those of earlier runs included.",
    )
    sliding_window: int | None = option(
        default=None, flag=False, help="The model's window in tokens, when all layers share it."
    )
    commit_interval: int = option(
        default=1,
        flag=False,
        help="What --deferred-commit-tokens came to: a decode step in so many writes the state.",
    )
    splits_scans: bool = option(
        default=False, flag=False, help="What --recurrent-prefill-split came to."
    )
    num_gpu_blocks: int | None = option(
        default=None, flag=False, help="Pages of the arena; filled in when memory is allocated."
    )
    capacity_tokens: int | None = option(
        default=None,
        flag=False,
        help="Tokens the arena holds at once in requests of full length, a multiple of the block "
        "size; filled in when memory is allocated.",
    )
    cpu_kvcache_space_bytes: int = option(
        default_factory=lambda: int(envs.VLLM_CPU_KVCACHE_SPACE * _GIB),
        flag=False,
        help="Bytes for state memory of each worker on the CPU (VLLM_CPU_KVCACHE_SPACE, in GiB).",
    )

    def __post_init__(self) -> None:
        if self.mamba_block_size is not None and self.mamba_cache_mode != "all":
            raise VLLMValidationError(
                "--mamba-block-size needs --mamba-cache-mode=all: other checkpoints are not "
                "aligned",
                "mamba_block_size",
                self.mamba_block_size,
            )
        if self.mamba_cache_mode == "all" and not self.enable_prefix_caching:
            raise VLLMValidationError(
                "--mamba-cache-mode=all keeps checkpoints for the prefix cache, which is off; "
                "leave it out, or use --enable-prefix-caching",
                "mamba_cache_mode",
                self.mamba_cache_mode,
            )
        for kind, size in self.block_sizes.items():
            if size < 1 or size % self.block_size:
                raise VLLMValidationError(
                    f"--block-sizes: {size} tokens for {kind!r} are no multiple of --block-size "
                    f"({self.block_size})",
                    "block_sizes",
                    size,
                )
        if self.kv_offloading_backend != "native" and self.kv_offloading_size is None:
            raise VLLMValidationError(
                f"--kv-offloading-backend {self.kv_offloading_backend} has no effect without "
                "--kv-offloading-size",
                "kv_offloading_backend",
                self.kv_offloading_backend,
            )
        if (self.capture_live is None) != (self.capture_live_path is None):
            raise VLLMValidationError(
                "--capture-live and --capture-live-path go together", "capture_live"
            )
        if self.cpu_kvcache_space_bytes < 1:
            raise VLLMValidationError("the variable VLLM_CPU_KVCACHE_SPACE must be positive")

    @property
    def checkpoint_interval(self) -> int | None:
        """Prompt tokens between additional checkpoints of recurrent state; None for none."""
        return (self.mamba_block_size or 1024) if self.mamba_cache_mode == "all" else None

    def metrics_info(self) -> dict[str, str]:
        """The fields as label values of the metric `vllm:cache_config_info`.

        Dashboards multiply `block_size` and `num_gpu_blocks`: the latter counts blocks of tokens
        here, and the arena's pages are `num_pages`.
        """
        fields = dataclasses.fields(self)
        info = {field.name: str(getattr(self, field.name)) for field in fields}
        info["num_pages"] = info["num_gpu_blocks"]
        if self.capacity_tokens is not None:
            info["num_gpu_blocks"] = str(self.capacity_tokens // self.block_size)
        return info
