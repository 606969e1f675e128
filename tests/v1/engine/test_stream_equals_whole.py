# SPDX-License-Identifier: Apache-2.0
"""A streamed answer is the whole answer, however the tokens arrive and wherever it stops."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.v1.engine.tokenizer_fixture import make_tokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

TOKENIZER = make_tokenizer()
#: scripts with one to four bytes per character, joined emoji, combining marks, both directions
CORPUS = [
    "the quick brown fox stops here",
    "Größe, naïve façade, Łódź",
    "Москва — столица",
    "日本語のテキストと中文字符",
    "한국어 문장입니다",
    "नमस्ते दुनिया क्षेत्र",
    "مرحبا بالعالم",
    "שלום עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷",
    "e\u0301a\u0308 zalgo\u0335\u0336",
    "\U0001d518\U0001d52b\U0001d526 \u200b\ufeff",
    "a\ufffdb",
]
IDS = [TOKENIZER.encode(text) for text in CORPUS]
NUM_IDS = max(max(ids) for ids in IDS)

pieces = st.one_of(
    st.sampled_from(IDS),
    st.tuples(st.sampled_from(IDS), st.integers(0, 12), st.integers(0, 40)).map(
        lambda cut: cut[0][cut[1] : cut[2]]
    ),
    st.text(max_size=8).map(lambda text: TOKENIZER.encode(text) if text else []),
    st.lists(st.integers(0, NUM_IDS), max_size=4),
)
sequences = st.lists(pieces, min_size=1, max_size=4).map(lambda lists: sum(lists, [])).filter(bool)


def generate(
    ids: list[int], cuts: list[int], kind: RequestOutputKind, interval: int = 1, **params: object
) -> tuple[list[str], list[int], str | None, str | int | None]:
    """Texts as sent, token ids, finish and stop reason, when `ids` arrive cut at `cuts`."""
    processor = OutputProcessor(TOKENIZER, interval)
    sampling = SamplingParams(max_tokens=len(ids), output_kind=kind, **params)  # type: ignore[arg-type]
    request = EngineCoreRequest("r-x", [1, 2], sampling, arrival_time=0.0)
    processor.add_request(request, "r", None)
    texts: list[str] = []
    tokens: list[int] = []
    edges = [0, *sorted({c % len(ids) for c in cuts} - {0}), len(ids)]
    for start, end in pairwise(edges):
        reason = FinishReason.LENGTH if end == len(ids) else None
        output = EngineCoreOutput("r-x", ids[start:end], finish_reason=reason)
        for made in processor.process_outputs(EngineCoreOutputs([output])).request_outputs:
            (completion,) = made.outputs
            texts.append(completion.text)
            tokens += completion.token_ids
            if made.finished:
                return texts, tokens, completion.finish_reason, completion.stop_reason
    raise AssertionError("it never finished")


@settings(max_examples=150, deadline=None)
@given(
    sequences,
    st.lists(st.integers(0, 200), max_size=30),
    st.integers(1, 5),
    st.lists(st.sampled_from(["fox", "o", "の", "ल", "👩", "\u0301", "ist"]), max_size=3),
    st.booleans(),
    st.integers(0, 6),
)
@example(IDS[8], list(range(200)), 1, ["👧"], False, 0)
@example(IDS[5], list(range(200)), 3, ["दुनिया"], True, 0)
@example(IDS[3][:-1], list(range(200)), 1, [], False, 0)
def test_streamed_text_is_the_whole_text(
    ids: list[int], cuts: list[int], interval: int, stop: list[str], include: bool, min_tokens: int
) -> None:
    options = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": min(min_tokens, len(ids)),
    }
    whole = generate(ids, [], RequestOutputKind.FINAL_ONLY, **options)
    one_by_one = generate(ids, list(range(len(ids))), RequestOutputKind.DELTA, **options)
    in_lumps = generate(ids, cuts, RequestOutputKind.DELTA, interval, **options)
    for texts, *rest in (one_by_one, in_lumps):
        assert "".join(texts) == whole[0][0]
        assert rest == list(whole[1:])
    seen = generate(ids, cuts, RequestOutputKind.CUMULATIVE, interval, **options)[0]
    assert seen[-1] == whole[0][0]
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))


@settings(max_examples=150, deadline=None)
@given(sequences, st.lists(st.integers(0, 200), max_size=30), st.data())
def test_nothing_of_a_stop_string_leaks(
    ids: list[int], cuts: list[int], data: st.DataObject
) -> None:
    """The stop string is taken from the text itself, so it is always found."""
    text = generate(ids, [], RequestOutputKind.FINAL_ONLY)[0][0]
    if not text:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    texts, _, finish, found = generate(ids, cuts, RequestOutputKind.DELTA, stop=[stop])
    assert "".join(texts) == text[: text.index(stop)]
    assert (finish, found) == ("stop", stop)


def test_whole_characters_only() -> None:
    for text, ids in zip(CORPUS, IDS, strict=True):
        texts = generate(ids, list(range(len(ids))), RequestOutputKind.DELTA)[0]
        assert "".join(texts) == text
        assert all("\ufffd" not in piece for piece in texts) or "\ufffd" in text
