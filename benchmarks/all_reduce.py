# SPDX-License-Identifier: Apache-2.0
"""Sums over tensor-parallel ranks: `python -m benchmarks.all_reduce [--ranks 2] [--kb 8,64,512]`.

Prints, for messages of so many kB in bfloat16, the time of one sum in microseconds (the slowest
rank's, the median of the repeats): the library's, on GPUs that share memory our own, and both with
the residual addition and norm that follow (rows of `--hidden` elements), as a kernel of its own and
as part of the sum. On GPUs a graph holds many sums, one after another, as the graph of a decode
step does: two per layer. On a CPU they are called one after another.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from statistics import median
from typing import Any

from benchmarks.rank_sums import measure_rank
from vllm.utils.start_method import start_method

_KB = (8, 16, 32, 64, 128, 256, 512)


def measure(
    ranks: int, sizes_kb: Sequence[int], hidden: int, repeats: int
) -> dict[int, dict[str, float]]:
    """kB of a message -> way -> microseconds of one sum."""
    context: Any = get_context(start_method("ranks"))
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"file://{folder}/store", sizes_kb, hidden, repeats, results)
        workers = [context.Process(target=measure_rank, args=(r, *arguments)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        found: dict[int, list[dict[str, list[float]]]] = {kb: [] for kb in sizes_kb}
        for _ in range(ranks * len(sizes_kb)):
            kb, times = results.get(timeout=600)
            found[kb].append(times)
        for worker in workers:
            worker.join()
    return {kb: _slowest(of_ranks) for kb, of_ranks in found.items()}


def _slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """The median over repeats of the slowest rank's time."""
    return {
        name: median(max(at_once) for at_once in zip(*(one[name] for one in of_ranks), strict=True))
        for name in of_ranks[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kb", default=",".join(map(str, _KB)), help="sizes, with commas")
    parser.add_argument("--hidden", type=int, default=4096, help="elements of a norm's row")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    sizes = [int(kb) for kb in options.kb.split(",")]
    found = measure(options.ranks, sizes, options.hidden, options.repeats)
    names = list(next(iter(found.values())))
    print(" ".join([f"{'kB':>6}", *(f"{name:>10}" for name in names)]))
    for kb, us in found.items():
        print(" ".join([f"{kb:>6}", *(f"{us[name]:>10.1f}" for name in names)]))


if __name__ == "__main__":
    main()
