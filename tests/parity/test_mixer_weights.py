# SPDX-License-Identifier: Apache-2.0
"""The device has the weights of the mixers that placements in use have, host memory the others'.

A CPU computes in host memory, so the two are told apart by a pretended device: what goes to the
host is copied, and the memory that it had is overwritten, as another tensor would. Steps may run no
mixer that is on the host. tests/gpu/test_mixer_memory.py counts a GPU's bytes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apriel2_models import MIXERS, make_tensors, save, stochastic
from parity_checks import in_this_process, journal_bytes, on_cpus, prompts
from torch import Tensor, nn

from tests.parity.in_process import runner_of
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.entrypoints.cli.explain_text import render
from vllm.entrypoints.cli.text_table import amount
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.host_weights import bytes_on_host, is_on_host, parameter_bytes
from vllm.model_executor.models.apriel2_mixers import StochasticMixer
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.worker.mixer_weights import MixerWeights
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.parity, in_this_process]

LAYERS, MEMORY = 2, 2**22
PROMPTS = prompts((3, 20))
MIXED = "kda,gdn"


class PretendedDevice:
    """`room`: bytes that may still come to it, None without a limit."""

    def __init__(self) -> None:
        self.room: int | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        kept = tensor.clone()
        tensor.view(torch.uint8).fill_(0xFF)
        return kept

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        if self.room is not None:
            self.room -= tensor.nbytes
            if self.room < 0:
                raise torch.OutOfMemoryError("the pretended device has no more")
        return tensor.clone()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    pretended, run = PretendedDevice(), StochasticMixer.after_norm

    def checked(self: StochasticMixer, *args: Any) -> Any:
        assert not bytes_on_host([self.mixers[self.active]]), "a step runs weights of the host"
        return run(self, *args)

    for name in ("to_host", "to_device"):
        monkeypatch.setattr(current_platform, name, getattr(pretended, name))
    monkeypatch.setattr(StochasticMixer, "after_norm", checked)
    return pretended


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = stochastic(LAYERS)
    return save(tmp_path_factory.mktemp("apriel2"), decoder, make_tensors(decoder))


@pytest.fixture
def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made: list[LLM] = []

    def start(placement: str = "all-attention", **settings: Any) -> LLM:
        given: dict[str, Any] = {
            "model": str(path),
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": MEMORY,
            "enable_sleep_mode": True,
        }
        made.append(LLM(**(given | settings), placement=placement))
        return made[-1]

    yield start
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def supernet_of(llm: LLM) -> HasPlacements:
    return runner_of(llm).supernet()


def on_device(llm: LLM) -> set[int]:
    """The mixers that are there as a whole; a mixer in two parts fails."""
    found = set()
    for mixer in supernet_of(llm).get_mixers():
        away = {is_on_host(param) for param in mixer.parameters()}
        assert len(away) == 1
        if away == {False}:
            found.add(id(mixer))
    return found


def used_by(llm: LLM, *placements: str) -> set[int]:
    model = supernet_of(llm)
    unused = {id(mixer) for mixer in model.unused_mixers(*placements)}
    return {id(mixer) for mixer in model.get_mixers()} - unused


def generate(llm: LLM, placement: str | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, placement=placement)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(batch, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "fp8"}, {"load_format": "dummy"}, {"sanitize": True}]
)
@pytest.mark.usefixtures("device")
def test_a_change_moves_the_weights(start: Any, settings: dict[str, Any]) -> None:
    """There and back, also when they were loaded anew meanwhile; parameters stay the same objects.
    Tokens are those of an engine that has had no other placement."""
    changes = ("all-kda", MIXED, "all-attention")
    expected = {one: generate(start(one, **settings)) for one in changes}
    assert len({str(tokens) for tokens in expected.values()}) == len(changes)
    llm = start(**settings)
    parameters = {id(param) for param in runner_of(llm).model.parameters()}
    assert on_device(llm) == used_by(llm, "all-attention") and len(on_device(llm)) == LAYERS
    for turn in range(2):
        for placement in changes:
            llm.change_placement(placement)
            assert on_device(llm) == used_by(llm, placement)
            if turn:
                llm.sleep(2)
                llm.wake_up()
                llm.collective_rpc("reload_weights")
                assert on_device(llm) == used_by(llm, placement)
            assert generate(llm) == expected[placement]
    assert {id(param) for param in runner_of(llm).model.parameters()} == parameters


@pytest.mark.usefixtures("device")
def test_placements_with_an_alias_are_in_use(start: Any) -> None:
    """What two of them have is there once; the engine's own is exchanged, they stay."""
    llm = start(placement_alias={"fast": "all-gdn", "mixed": MIXED})
    aliases = ("all-gdn", MIXED)
    assert on_device(llm) == used_by(llm, "all-attention", *aliases)
    alone = {one: generate(start(one)) for one in ("all-attention", "all-swa", *aliases)}
    assert generate(llm, "fast") == alone["all-gdn"]
    for placement in ("all-swa", "all-gdn", "all-attention"):
        llm.change_placement(placement)
        assert on_device(llm) == used_by(llm, placement, *aliases)
        assert generate(llm) == alone[placement]
        assert generate(llm, "mixed") == alone[MIXED]


@pytest.mark.parametrize(
    ("fails", "share"),
    [("device", 0.0), ("device", 0.5), ("host", 0.0), ("host", 0.5), ("arena", 0.0)],
)
def test_a_change_that_fails_changes_nothing(
    fails: str,
    share: float,
    start: Any,
    device: PretendedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the weights find no room, all of them or some, and where the memory does not; the next
    change may be one that fits."""
    aliases = {"fast": "gdn,attention"}
    llm, other = start(placement_alias=aliases), start("all-kda")
    before, expected = generate(llm), generate(other)
    fast, there, pages = generate(llm, "fast"), on_device(llm), runner_of(llm).arena.plan.num_pages
    arrives = parameter_bytes(
        mixer for mixer in supernet_of(llm).get_mixers() if id(mixer) in used_by(llm, "all-kda")
    )
    with monkeypatch.context() as patch:
        if fails == "device":
            device.room = int(share * arrives)
        elif fails == "host":
            # The one mixer that leaves has two parameters.
            fail_once(patch, current_platform, "to_host", skipped=int(2 * share))
        else:
            fail_once(patch, ModelRunner, "initialize_kv_cache", skipped=0)
        with pytest.raises(RuntimeError, match=r"is attention,attention as before, .*pretended"):
            llm.change_placement("all-kda")
    device.room = None
    assert llm.collective_rpc("get_layer_placements") == [{0: "attention", 1: "attention"}]
    assert on_device(llm) == there and runner_of(llm).arena.plan.num_pages == pages
    assert generate(llm) == before and generate(llm, "fast") == fast
    llm.change_placement("all-kda")
    assert generate(llm) == expected and generate(llm, "fast") == fast


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, skipped: int) -> None:
    """The call after `skipped` ones."""
    original, calls = getattr(owner, name), iter(range(1 << 20))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == skipped:
            raise torch.OutOfMemoryError("the pretended memory is full")
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)


@on_cpus
@pytest.mark.usefixtures("device", "forking")
def test_a_rank_that_fails_takes_the_others_back(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever those have done by then; none waits for another."""
    calls = iter(range(1 << 20))

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        if get_tensor_model_parallel_rank() == 1 and next(calls) == 1:
            raise torch.OutOfMemoryError("the pretended device has no more")
        return tensor.clone()

    monkeypatch.setattr(current_platform, "to_device", to_device)
    expected = [generate(start(one)) for one in ("all-attention", "all-kda")]
    llm = start(tensor_parallel_size=2)
    assert generate(llm) == expected[0]
    with pytest.raises(RuntimeError, match="as before, .*the pretended device has no more"):
        llm.change_placement("all-kda")
    assert llm.collective_rpc("get_layer_placements") == [{0: "attention", 1: "attention"}] * 2
    assert generate(llm) == expected[0]
    llm.change_placement("all-kda")
    assert generate(llm) == expected[1]


@on_cpus
@pytest.mark.usefixtures("forking")
def test_a_replica_that_fails_takes_the_others_back(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        if get_current_vllm_config().parallel_config.data_parallel_rank == 1:
            raise torch.OutOfMemoryError("the pretended device has no more")
        return tensor.clone()

    expected = generate(start())
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(current_platform, "to_device", to_device)
    llm = start(data_parallel_size=2)
    # The second replica has what it needs.
    llm.change_placement("all-attention")
    with pytest.raises(EngineGenerateError, match="failed on replica 1: .*as before.*no more"):
        llm.change_placement("all-kda")
    assert llm.collective_rpc("get_layer_placements") == [{0: "attention", 1: "attention"}] * 2
    assert generate(llm) == expected


@pytest.mark.usefixtures("device")
def test_what_weights_leave_is_the_arenas(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the arena takes what is left, and not so many bytes as are given."""
    monkeypatch.setattr(Worker, "given_arena_bytes", property(lambda worker: None))
    monkeypatch.setattr(Worker, "_profiled_memory", lambda worker: MEMORY)

    def bytes_of(llm: LLM) -> tuple[int, int]:
        mixers = supernet_of(llm).get_mixers()
        state = runner_of(llm).arena.buffer.nbytes + journal_bytes(llm)
        return state, parameter_bytes(mixers) - bytes_on_host(mixers)

    llm = start("all-kda", kv_cache_memory_bytes=None)
    most = MEMORY + journal_bytes(llm) + bytes_of(llm)[1]
    found = set()
    for placement in ("all-attention", MIXED, "all-kda", "all-attention"):
        llm.change_placement(placement)
        state, mixers = bytes_of(llm)
        assert most - runner_of(llm).arena.plan.page_bytes < state + mixers <= most
        found.add(mixers)
    assert len(found) == 3
    with monkeypatch.context() as patch:
        more = parameter_bytes(supernet_of(llm).get_mixers()) + 8 * MEMORY
        patch.setattr(MixerWeights, "num_bytes", lambda weights, placements: more)
        with pytest.raises(VLLMValidationError, match=f"mixers take {more} of the .* bytes that"):
            llm.change_placement("all-kda")
    assert generate(llm) == generate(start("all-attention"))


@pytest.mark.usefixtures("device")
def test_a_request_brings_what_finds_room(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement without an alias: refused by bytes, or fetched, and there until the engine's own
    changes."""
    llm = start(placement_alias={"mixed": MIXED})
    named = used_by(llm, "all-attention", MIXED)
    # It shares a mixer with an alias.
    asked = "kda,sliding_window"
    missing = used_by(llm, asked) - named
    size = parameter_bytes(one for one in supernet_of(llm).get_mixers() if id(one) in missing)
    assert len(missing) == 1
    expected = generate(start(asked))
    room = {"bytes": size - 1}
    monkeypatch.setattr(Worker, "room_for_weights", lambda worker: room["bytes"])
    refused = rf"placement: {size} bytes .* leaves {size - 1}"
    with pytest.raises(VLLMValidationError, match=refused):
        generate(llm, asked)
    with pytest.raises(VLLMValidationError, match=refused):
        overlap(llm, asked)
    assert on_device(llm) == named and not llm.llm_engine.has_unfinished_requests()
    room["bytes"] = size
    assert generate(llm, asked) == expected
    room["bytes"] = 0
    # Only the first one needs it.
    assert generate(llm, asked) == expected
    overlap(llm, "kda,attention")
    assert on_device(llm) == named | missing
    llm.change_placement("all-attention")
    assert on_device(llm) == named


@pytest.mark.usefixtures("device")
def test_changes_and_requests_at_random(start: Any) -> None:
    """Requests choose any placement between changes; each gets what an engine of it alone gives."""
    rng = random.Random(0)
    every = [",".join(names) for names in itertools.product(MIXERS, repeat=LAYERS)]
    expected = {one: generate(start(one)) for one in every}
    llm = start(placement_alias={"mixed": MIXED}, max_request_placements=2)
    for _ in range(12):
        in_use = [rng.choice(every), MIXED]
        llm.change_placement(in_use[0])
        for _ in range(4):
            chosen = rng.choice(every)
            in_use.append(chosen)
            assert generate(llm, chosen) == expected[chosen]
            assert on_device(llm) == used_by(llm, *in_use)
        assert generate(llm) == expected[in_use[0]]


def overlap(llm: LLM, placement: str) -> None:
    llm.llm_engine.engine_core.call_utility("overlap_placement", placement)


def test_no_layer_waits_for_the_others(path: Path, device: PretendedDevice, start: Any) -> None:
    """While the model is built, one layer's mixers are on the device at most, beside those that
    stay there."""
    seen: list[int] = []
    build = StochasticMixer.__init__

    def note(self: StochasticMixer, *args: Any) -> None:
        build(self, *args)
        layers.append(self)
        seen.append(sum(parameter_bytes([one]) - bytes_on_host([one]) for one in layers))

    layers: list[nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StochasticMixer, "__init__", note)
        llm = start()
    layer = parameter_bytes(layers[:1])
    stays = parameter_bytes(
        one for one in supernet_of(llm).get_mixers() if id(one) in on_device(llm)
    )
    assert seen[0] == layer and seen[-1] <= layer + stays * (LAYERS - 1) // LAYERS < LAYERS * layer


@on_cpus
def test_a_cpu_leaves_weights_where_they_are(start: Any) -> None:
    llm = start()
    addresses = [param.data_ptr() for param in runner_of(llm).model.parameters()]
    llm.change_placement("all-kda")
    assert [param.data_ptr() for param in runner_of(llm).model.parameters()] == addresses
    noted = {one.what: one for one in llm.llm_engine.vllm_config.decisions.decisions()}
    assert noted["weights of mixers that no placement in use has"].chosen.endswith("GiB stay")


@pytest.mark.usefixtures("device")
def test_explain_counts_both(start: Any) -> None:
    """Also after a change."""
    llm = start(placement_alias={"fast": "all-gdn"})
    model = runner_of(llm).model
    for placement in ("all-attention", "all-kda", "all-gdn"):
        llm.change_placement(placement)
        tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
        away = bytes_on_host(supernet_of(llm).get_mixers())
        memory = llm.explain().memory
        assert memory.host_bytes == away > 0
        assert memory.weight_bytes == sum(one.nbytes for one in tensors) - away
        assert f" and {amount(away)} in host memory" in render(llm.explain())
