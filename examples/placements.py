# SPDX-License-Identifier: Apache-2.0
"""How good and how fast are the placements of a supernet? Asks a running server and draws it.

    vllm serve MODEL --placement-alias swa=all-swa gdn=all-gdn kda=all-kda
    python examples/placements.py --output frontier.png

Every request carries its placement. Quality: the mean loss per token of held-out text, from
`prompt_logprobs`. Speed: tokens per second of requests that generate side by side, the best of
`--repeats`. Beside them is drawn what a decode step should cost by `vllm explain`, for the device
that `--device` names, against what it took. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from python_library import is_held_out, library_files, library_root
from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.decode_work import decode_work
from vllm.model_executor.model_outline import models_on_meta
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.v1.core.decode_cost import DeviceSpeed, device_speed, predict


@dataclass(frozen=True)
class Measured:
    """A placement's loss in nats per token, its tokens per second, and milliseconds per decode
    step: as measured, prompts included, and as predicted."""

    placement: str
    loss: float
    speed: float
    step_ms: float = 0.0
    predicted_ms: float = 0.0


class Server:
    """The one at `url`, and the text it is measured with."""

    def __init__(self, url: str, num_texts: int, num_tokens: int, concurrency: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._concurrency, self._num_tokens = concurrency, num_tokens
        self._pool = ThreadPoolExecutor(concurrency)
        card = self._http.get("/v1/models").raise_for_status().json()["data"][0]
        self._keep = card["max_model_len"] - num_tokens
        self.model: str = card["root"]
        self._contexts: list[float] = []
        paths = [p for p in library_files() if is_held_out(p.relative_to(library_root()))]
        texts = (path.read_text(encoding="utf-8", errors="replace")[:4000] for path in paths)
        self._texts = list(itertools.islice((text for text in texts if len(text) > 500), num_texts))

    def complete(self, prompt: str, placement: str, **fields: Any) -> dict[str, Any]:
        """The reply; a refusal is an error that shows its message."""
        body = {"prompt": prompt, "placement": placement, "temperature": 0, **fields}
        body |= {"truncate_prompt_tokens": self._keep, "truncation_side": "right"}
        reply = self._http.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise SystemExit(f"error: {reply.json()['error']['message']}")
        answer: dict[str, Any] = reply.json()
        return answer

    def loss(self, placement: str) -> float:
        """Mean over all tokens of the texts but each first one."""

        def scored(text: str) -> list[float]:
            reply = self.complete(text, placement, max_tokens=1, prompt_logprobs=0)
            entries = reply["choices"][0]["prompt_logprobs"][1:]
            return [next(iter(entry.values()))["logprob"] for entry in entries]

        values = list(itertools.chain(*self._pool.map(scored, self._texts)))
        return -sum(values) / len(values)

    def speed(self, placement: str) -> float:
        """Tokens per second of `concurrency` requests, prompts included."""
        begin = time.perf_counter()

        def run(i: int) -> int:
            text = self._texts[i % len(self._texts)]
            reply = self.complete(
                text, placement, max_tokens=self._num_tokens, ignore_eos=True, cache_salt=str(begin)
            )
            usage = reply["usage"]
            self._contexts.append(usage["prompt_tokens"] + usage["completion_tokens"] / 2)
            return int(usage["completion_tokens"])

        total = sum(self._pool.map(run, range(self._concurrency)))
        return total / (time.perf_counter() - begin)

    @property
    def context(self) -> int:
        """Tokens of a request halfway through its output, on average."""
        return round(sum(self._contexts) / len(self._contexts))


class Outline:
    """A supernet without weights, made from its config alone."""

    def __init__(self, model: str) -> None:
        self._config, (supernet, *_) = models_on_meta(EngineArgs(model).create_engine_config())
        if not isinstance(supernet, HasPlacements) or not supernet.get_mixer_names():
            raise SystemExit(f"error: {model} is no supernet")
        self._supernet = supernet

    def choose(self, count: int | None) -> list[str]:
        """All placements, or as many: those with one mixer everywhere, and others at random. `_`
        stands for a layer that has no choice."""
        layers = range(self._config.model_config.hf_text_config.num_hidden_layers)
        mixers = self._supernet.get_layer_mixers()
        names = itertools.product(*(mixers.get(i, ("_",)) for i in layers))
        chosen = [",".join(one) for one in names]
        if count is None:
            return chosen
        uniform = [one for one in chosen if uniform_name(one)]
        others = [one for one in chosen if not uniform_name(one)]
        count = min(max(count - len(uniform), 0), len(others))
        return uniform + random.Random(0).sample(others, count)

    def seconds(self, placement: str, device: DeviceSpeed, batch: int, context: int) -> float:
        """Of a decode step, as predicted."""
        self._supernet.set_layer_placements(placement)
        work = decode_work(self._config, self._supernet)
        return predict(work, device, batch, context).seconds


def uniform_name(placement: str) -> str | None:
    """`all-X` where every layer that has a choice has X."""
    names = set(placement.split(",")) - {"_"}
    return f"all-{names.pop()}" if len(names) == 1 else None


def frontier(found: list[Measured]) -> list[Measured]:
    """Those that none beats in both loss and speed, the fastest first."""
    best: list[Measured] = []
    for one in sorted(found, key=lambda m: (-m.speed, m.loss)):
        if not best or one.loss < best[-1].loss:
            best.append(one)
    return best


def draw(found: list[Measured], path: Path, device: str) -> None:
    """Loss over speed, with the frontier as a line; measured over predicted steps. The uniform
    placements are named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (axes, steps) = plt.subplots(1, 2, figsize=(12, 4.5))
    axes.plot([m.speed for m in found], [m.loss for m in found], ".", alpha=0.5)
    best = frontier(found)
    axes.step([m.speed for m in best], [m.loss for m in best], where="post", label="frontier")
    steps.plot([m.predicted_ms for m in found], [m.step_ms for m in found], ".", alpha=0.5)
    for one in found:
        name = uniform_name(one.placement)
        if name is not None:
            axes.annotate(name, (one.speed, one.loss))
            steps.annotate(name, (one.predicted_ms, one.step_ms))
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("loss on held-out text (nats per token)")
    axes.legend()
    steps.set_xlabel(f"predicted for {device} (ms per decode step)")
    steps.set_ylabel("measured (ms per decode step)")
    for one_axes in (axes, steps):
        one_axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--output", type=Path, required=True, help="a PNG; a JSON goes beside it")
    parser.add_argument("--placements", type=int, help="as many at random, instead of all")
    parser.add_argument("--texts", type=int, default=8, help="held-out files to score")
    parser.add_argument("--tokens", type=int, default=128, help="generated by each request")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="H200", help="as --decode-device of vllm explain")
    parser.add_argument("--model", help="where its config is (default: what the server was given)")
    args = parser.parse_args()
    device = device_speed(args.device)
    server = Server(args.url, args.texts, args.tokens, args.concurrency)
    outline = Outline(args.model or server.model)
    found = []
    for placement in tqdm(outline.choose(args.placements), desc="measuring", unit="placement"):
        loss = server.loss(placement)
        speed = max(server.speed(placement) for _ in range(args.repeats))
        found.append(Measured(placement, loss, speed, 1e3 * args.concurrency / speed))
    step = (device, args.concurrency, server.context)
    found = [
        replace(one, predicted_ms=1e3 * outline.seconds(one.placement, *step)) for one in found
    ]
    draw(found, args.output, device.name)
    best = frontier(found)
    result = {"measured": [asdict(m) for m in found], "frontier": [m.placement for m in best]}
    args.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    for one in best:
        print(
            f"{one.speed:9.1f} tokens/s  {one.loss:.4f} nats  {one.step_ms:8.2f} ms per step, "
            f"{one.predicted_ms:.3f} predicted  {one.placement}"
        )


if __name__ == "__main__":
    try:
        main()
    except httpx.ConnectError as error:
        sys.exit(f"error: no server answers at --url: {error}; --help says how to start one")
