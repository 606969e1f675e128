# SPDX-License-Identifier: Apache-2.0
"""Predicted steps of layouts: names, links and examples worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm.distributed.collective import Collective
from vllm.v1.core.decode_cost import (
    DEVICES,
    DeviceSpeed,
    ExpertsWork,
    PartWork,
    StateWork,
    speed_of_device,
)
from vllm.v1.core.layout_cost import (
    Layout,
    StageWork,
    layouts_of,
    predict_layout,
    traffic_of,
)
from vllm.v1.core.link_speed import LINK_OF_DEVICE, LINKS, LinkSpeed, link_of, link_speed
from vllm.v1.core.prefill_cost import predict_prefill

#: 1 byte of memory takes a microsecond, and nothing else takes time
SLOW = DeviceSpeed("slow", 1e6, 1e30, 0.0)
#: 1 byte takes 10 us, an exchange 100 and a hop 1
WIRE = LinkSpeed("wire", 1e5, 100e-6, 1e-6, "a test")
REDUCE = Collective("all-reduce", "layers", 4.0)
EXPERTS = Collective("all-reduce", "experts", 4.0)
GATHER = Collective("all-gather", "logits", 3.0)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp1", Layout()),
        ("tp2", Layout(tp=2)),
        ("dp3", Layout(dp=3)),
        ("tp2pp3dp4", Layout(2, 3, 4)),
        ("tp4ep", Layout(4, ep=True)),
    ],
)
def test_names_of_layouts(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout and layout.name == text
    assert Layout.parse(layout.name).devices == layout.tp * layout.pp * layout.dp


@pytest.mark.parametrize("text", ["", "2", "tp", "tp0", "tp2tp2", "tp2 pp2", "xp2", "tp2epx"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected sizes such as tp2"):
        Layout.parse(text)


def test_layouts_of_four_devices() -> None:
    names = [layout.name for layout in layouts_of(4, (False,))]
    assert names == ["dp4", "tp2dp2", "pp2dp2", "tp4", "tp2pp2", "pp4"]
    both = [layout.name for layout in layouts_of(4, (False, True))]
    assert sorted(set(both) - set(names)) == ["dp4ep", "tp2dp2ep", "tp2pp2ep", "tp4ep"]
    assert [layout.name for layout in layouts_of(6, (False,))].count("tp3pp2") == 1
    assert all(layout.devices == 6 for layout in layouts_of(6, (False,)))


# ---- by hand -------------------------------------------------------------------------------------


def test_ranks_wait_for_their_sums() -> None:
    """A weight of 50 bytes; 2 sums of 4 bytes per token in 3 pieces, and a gathered 3."""
    work = StageWork([PartWork("x", weight_bytes=50)], [REDUCE, EXPERTS, GATHER])
    layout = Layout(tp=3)
    cost = predict_layout([work], layout, SLOW, WIRE, 6, 1)
    sums, gathered = 100 + 4 + 10 * (6 * 4 / 3 * 4), 100 + 2 + 10 * (6 * 3 * 2)
    assert cost.exchange_seconds == pytest.approx((2 * sums + gathered) * 1e-6)
    assert cost.seconds == pytest.approx(50e-6 + cost.exchange_seconds)
    assert cost.tokens_per_s == pytest.approx(6 / cost.seconds)
    sent = traffic_of(work, layout, 6)
    assert (sent.all_reduces, sent.experts, sent.all_gathers) == (32, 32, 36)
    assert (sent.streams, sent.exchanges, sent.total) == (0, 3, 100)


def test_replicas_add_up() -> None:
    work = [StageWork([PartWork("x", weight_bytes=50)], [])]
    cost = predict_layout(work, Layout(dp=4), SLOW, None, 8, 1)
    assert cost.seconds == pytest.approx(50e-6) and cost.exchange_seconds == 0
    assert cost.tokens_per_s == pytest.approx(4 * 8 / 50e-6)


def test_one_request_goes_through_all_stages() -> None:
    first = StageWork([PartWork("x", weight_bytes=1000)], [], stream_bytes=2)
    last = StageWork([PartWork("x", weight_bytes=3000)], [], sample_bytes=8)
    cost = predict_layout([first, last], Layout(pp=2), SLOW, WIRE, 1, 1)
    # 101 us and 20 for the stream, 101 and 80 for the token that comes back
    assert cost.exchange_seconds == pytest.approx(302e-6)
    assert cost.seconds == pytest.approx((4000 + 302) * 1e-6)


def test_with_many_the_slowest_stage_sets_the_pace() -> None:
    """Two groups of 5: each needs 3,000 us of the last stage."""
    first = StageWork([PartWork("x", weight_bytes=1000)], [], stream_bytes=2)
    last = StageWork([PartWork("x", weight_bytes=3000)], [], sample_bytes=8)
    cost = predict_layout([first, last], Layout(pp=2), SLOW, WIRE, 10, 1)
    assert cost.seconds == pytest.approx(2 * 3000e-6)
    assert cost.tokens_per_s == pytest.approx(10 / 6000e-6)
    assert traffic_of(first, Layout(pp=2), 5).streams == 10
    assert traffic_of(last, Layout(pp=2), 5).streams == 40


def test_small_sums_go_through_peer_memory() -> None:
    """As long as the table says, in which messages are those of two ranks; larger ones are NCCL's,
    as are other exchanges and all of them over other links."""
    link, us = LINKS["NVLink4"], 1e-6

    def seconds(size: float, ranks: int, kind: str = "all-reduce", **more: Any) -> float:
        one = Collective(kind, "layers", size, **more)
        return link.collective_seconds(one, ranks, 1)

    for size, took in ((100, 2.6), (8192, 2.6), (98_304, 3.25), (524_288, 5.6)):
        assert seconds(size, 2) == pytest.approx(took * us)
    # One shot to three others, and two of three quarters of the message.
    assert seconds(16_384, 4) == pytest.approx(2.8 * us)
    assert seconds(524_288, 4) == pytest.approx(2 * (4.1 + 0.5 * 1.5) * us)
    nccl = replace(link, peer_sums=False)
    for size, ranks in ((524_289, 2), (8192, 9)):
        one = Collective("all-reduce", "layers", size)
        assert link.collective_seconds(one, ranks, 1) == nccl.collective_seconds(one, ranks, 1)
        assert seconds(size, ranks) > 7 * us
    assert seconds(8192, 2, "all-gather") > 7 * us < seconds(8192, 2, among="replicas")
    assert not LINKS["NVLink3"].peer_sums and not link_speed("450e9,7").peer_sums


# ---- prefills ------------------------------------------------------------------------------------

#: a FLOP takes a microsecond, and nothing else takes time
THINKER = DeviceSpeed("thinker", 1e30, 1e6, 0.0)


def test_prefills_multiply_for_every_token_and_make_logits_of_the_last() -> None:
    """A step of 8 tokens, two prompts of 4. A token attends to 2.5 on average, or to 1.75."""
    window = StateWork(flops_per_token=4.0, window=2)
    states = (StateWork(flops_per_token=2.0), window, StateWork(fixed_flops=7.0))
    work = StageWork([PartWork("x", flops=110, states=states, head_flops=100)], [])
    cost = predict_prefill([work], Layout(dp=3), THINKER, None, 8, 4)
    computing = 8 * (10 + 2 * 2.5 + 4 * 1.75 + 7) + 2 * 100
    assert cost.seconds == pytest.approx(computing * 1e-6) and cost.exchange_seconds == 0
    assert cost.tokens_per_s == pytest.approx(3 * 8 / (computing * 1e-6))


def test_prefills_read_once_per_step_and_prompt() -> None:
    """Of four steps of a prompt each reads the weights, a chosen expert, and the state."""
    states = (StateWork(fixed_bytes=20.0), StateWork(bytes_per_token=2.0))
    experts = (ExpertsWork(1, 1.0, 5.0),)
    part = PartWork("x", weight_bytes=50, states=states, experts=experts)
    cost = predict_prefill([StageWork([part], [])], Layout(), SLOW, None, 8, 31)
    assert cost.seconds == pytest.approx((50 + 5 + 20 + 2 * 16) * 1e-6)


def test_the_slowest_stage_sets_the_pace_of_prefills() -> None:
    """It adds up 8 tokens of 4 bytes, and gathers logits of the two that end prompts."""
    first = StageWork([PartWork("x", weight_bytes=100)], [], stream_bytes=2)
    last = StageWork([PartWork("x", weight_bytes=300)], [REDUCE, GATHER], sample_bytes=8)
    cost = predict_prefill([first, last], Layout(tp=2, pp=2), SLOW, WIRE, 8, 4)
    exchanges = (100 + 2 + 10 * (8 * 4)) + (100 + 1 + 10 * (2 * 3))
    assert cost.exchange_seconds == pytest.approx(exchanges * 1e-6)
    assert cost.seconds == pytest.approx((300 + exchanges) * 1e-6)
    for tokens, length in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match="prefills need tokens"):
            predict_prefill([first], Layout(), SLOW, WIRE, tokens, length)


# ---- rates ---------------------------------------------------------------------------------------


def test_links() -> None:
    assert link_speed("NVLink4") is LINKS["NVLink4"] is link_of("H200")
    assert set(LINK_OF_DEVICE) == set(DEVICES)
    given = link_speed("1e11,5")
    assert (given.bytes_per_s, given.base_s, given.hop_s) == (1e11, pytest.approx(5e-6), 0)
    assert "NCCL" in link_speed("1e11").source and "as given" in given.source
    for text in ("NVLink9", "", "0", "1e9,-1", "1,2,3", "nan,5", "1e9,nan", "inf"):
        with pytest.raises(ValueError, match="expected one of NVLink3"):
            link_speed(text)
    with pytest.raises(ValueError, match="--decode-link"):
        link_of("given device")


def test_devices_by_the_names_of_their_drivers() -> None:
    assert speed_of_device("NVIDIA H200") is DEVICES["H200"]
    # Another board, with other rates.
    assert speed_of_device("NVIDIA H100 PCIe") is None and speed_of_device("cpu") is None
