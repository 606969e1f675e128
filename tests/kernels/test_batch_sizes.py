# SPDX-License-Identifier: Apache-2.0
"""Nothing that depends on the batch is a constant of a recurrent layer's kernel: it would be
compiled anew for each batch, in the middle of serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels import test_kda, test_mamba1, test_mamba2
from tests.kernels.cases import gdn_case, gdn_decode_case, run
from tests.kernels.drafts import DraftedDecoder
from vllm.kernels.cuda import CudaKernels

interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts interpreted launches")

HEADS = (2, 4, 16, 16)
#: below and above the tile sizes of chunked scans; the sizes at which launches change are not here
BATCHES = (2, 3, 7, 16)


def decode(make: Callable[[int], DraftedDecoder]) -> Callable[[int], None]:
    """A step with a journal, and one without."""

    def both(count: int) -> None:
        decoder = make(count)
        tokens = [x[0] for x in decoder.tokens(1)]
        decoder.decode(tokens, decoder.indices)
        stack = decoder.stack(2)
        decoder.decode([torch.cat([x, x]) for x in tokens], decoder.indices, stack)
        entries = [[i, int(index)] for i, index in enumerate(decoder.indices)]
        decoder.commit(stack, torch.tensor(entries, dtype=torch.int32))

    return both


def prefill(make: Any, op: str, size: Any) -> Callable[[int], None]:
    def step(count: int) -> None:
        getattr(CudaKernels(), op)(make([count * 5] * count, [False] * count, size, "cpu"))

    return step


def gdn_prefill(count: int) -> None:
    case = gdn_case([count * 30] * count, [False] * count, HEADS, torch.float32, "cpu")
    run(CudaKernels(), "gdn_prefill", case)


def gdn_decode(count: int) -> None:
    run(CudaKernels(), "gdn_decode", gdn_decode_case(count, HEADS, torch.float32, "cpu"))


KERNELS = CudaKernels()
STEPS: dict[str, Callable[[int], None]] = {
    "gdn prefill": gdn_prefill,
    "gdn decode": gdn_decode,
    "kda prefill": prefill(test_kda.prefill, "kda_prefill", test_kda.SIZES[0]),
    "kda decode": decode(lambda n: test_kda.Decoder(KERNELS, n, test_kda.SIZES[0], "cpu")),
    "mamba1 prefill": prefill(test_mamba1.prefill, "mamba1_prefill", test_mamba1.SIZES[0]),
    "mamba1 decode": decode(lambda n: test_mamba1.Decoder(KERNELS, n, test_mamba1.SIZES[0], "cpu")),
    "mamba2 prefill": prefill(test_mamba2.prefill, "mamba2_prefill", test_mamba2.SIZES[0]),
    "mamba2 decode": decode(lambda n: test_mamba2.Decoder(KERNELS, n, test_mamba2.SIZES[0], "cpu")),
}


@pytest.mark.parametrize("name", STEPS)
def test_batches_share_their_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, tuple[tuple[str, Any], ...]]] = set()

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constants = {key: given[key] for key in self.constexprs if key in given}
        seen.add((self.fn.__name__, tuple(constants.items())))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)

    def constants(count: int) -> set[Any]:
        seen.clear()
        STEPS[name](count)
        return set(seen)

    expected = constants(BATCHES[0])
    assert expected
    for count in BATCHES[1:]:
        assert constants(count) == expected
