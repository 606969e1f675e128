# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm bench serve`; those of the requests themselves are in `datasets`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PositiveInt

from vllm.benchmarks.arrivals import Load
from vllm.benchmarks.client import DIALECTS
from vllm.benchmarks.metrics import GOODPUT_METRICS, METRICS
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option

#: fields that go into the body of a request as they are
_BODY_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logprobs",
    "chat_template_kwargs",
)


@config
class ServeArgs:
    """The server, the load, and what is reported."""

    backend: Literal["openai", "openai-chat", "vllm"] = option(
        default="openai", help="openai and vllm use /v1/completions, openai-chat the chat endpoint."
    )
    base_url: str | None = option(default=None, help="Server; overrides --host and --port.")
    host: str = option(default="127.0.0.1", help="Server's host.")
    port: int = option(default=8000, help="Server's port.")
    endpoint: str | None = option(default=None, help="Path; default: the backend's.")
    header: list[str] | None = option(default=None, help="Extra headers, KEY=VALUE.")
    insecure: bool = option(default=False, help="Do not check the server's certificate.")
    model: str | None = option(default=None, help="Model; default: the first that is served.")
    served_model_name: str | None = option(
        default=None, help="Name in the requests, where it is not --model."
    )
    tokenizer: str | None = option(default=None, help="Tokenizer; default: the model's.")
    tokenizer_mode: str = option(default="auto", help="As for vllm serve.")
    trust_remote_code: bool = option(default=False, help="Run code of the tokenizer's repository.")
    seed: int = option(default=0, help="Seed of prompts and arrival times.")

    request_rate: float = option(default=float("inf"), help="Requests per second; inf: at once.")
    burstiness: float = option(
        default=1.0, help="1: Poisson arrivals; less comes in bursts, more comes evenly."
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        default=None, help="Change the rate over the run, instead of --request-rate."
    )
    ramp_up_start_rps: float | None = option(default=None, help="First rate of a ramp.")
    ramp_up_end_rps: float | None = option(default=None, help="Last rate of a ramp.")
    max_concurrency: PositiveInt | None = option(default=None, help="Most requests in flight.")
    client_processes: PositiveInt | None = option(
        default=None,
        help="Processes that send the requests; default: one per 64 streams at once (with a finite "
        "rate at most one per 10,000 tokens/s), on up to half of the cores.",
    )
    fail_on_busy_client: bool = option(
        default=False,
        help="Exit with status 3 when a client process was busy more than 80 percent of the time.",
    )
    num_warmups: int = option(default=0, help="Requests sent before, not counted.")
    ready_check_timeout_sec: int = option(
        default=0, help="Wait up to this long for a first answer; 0: do not check."
    )

    ignore_eos: bool = option(default=False, help="Always generate the full output length.")
    temperature: float | None = option(default=0.0, help="Sampling; None leaves it to the server.")
    top_p: float | None = option(default=None, help="Sampling.")
    top_k: int | None = option(default=None, help="Sampling.")
    min_p: float | None = option(default=None, help="Sampling.")
    frequency_penalty: float | None = option(default=None, help="Sampling.")
    presence_penalty: float | None = option(default=None, help="Sampling.")
    repetition_penalty: float | None = option(default=None, help="Sampling.")
    logprobs: int | None = option(default=None, help="Logprobs per token to ask for.")
    chat_template_kwargs: dict[str, Any] | None = option(default=None, help="Template variables.")
    extra_body: dict[str, Any] | None = option(default=None, help="More keys for the body.")
    request_id_prefix: str | None = option(
        default=None, help="Send X-Request-Id, this text and the request's number."
    )

    percentile_metrics: str = option(
        default=",".join(METRICS), help="Comma list of the metrics to print."
    )
    metric_percentiles: str = option(default="99", help="Comma list of percentiles.")
    goodput: list[str] | None = option(
        default=None, help="Service levels in ms, such as ttft:500 tpot:50 e2el:5000."
    )
    save_result: bool = option(default=False, help="Write the result as JSON.")
    save_detailed: bool = option(default=False, help="With figures of every request.")
    append_result: bool = option(default=False, help="Append the result as a line of JSON.")
    result_dir: str | None = option(default=None, help="Directory of the result; default: here.")
    result_filename: str | None = option(default=None, help="File; default: made of the settings.")
    metadata: list[str] | None = option(default=None, help="KEY=VALUE pairs for the result.")
    label: str | None = option(default=None, help="Name of the run; default: the backend.")
    plot: str | None = option(default=None, help="Write a picture, FILE.png (needs matplotlib).")
    profile: bool = option(
        default=False, help="Have the server profile the run: POST /start_profile, /stop_profile."
    )
    disable_tqdm: bool = option(default=False, help="No progress bar.")

    def __post_init__(self) -> None:
        # What cannot be parsed must stop the command before the load, not after it.
        self.load()
        self.shown_metrics()
        self.percentiles()
        self.goodput_levels()
        self.result_metadata()
        self.headers()

    @property
    def saves(self) -> bool:
        """Whether a file of the result is asked for."""
        return self.save_result or self.append_result or self.save_detailed

    def url(self) -> str:
        """The server, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    def endpoint_url(self) -> str:
        return self.url() + "/" + (self.endpoint or DIALECTS[self.backend].path).lstrip("/")

    def load(self) -> Load:
        """The arrival process; `VLLMValidationError` when the flags contradict each other."""
        try:
            if self.ramp_up_strategy is None and self.ramp_up_start_rps is None:
                return Load(self.request_rate, self.burstiness, None, self.ramp_up_end_rps)
            rate = self.ramp_up_start_rps or 0.0
            return Load(rate, self.burstiness, self.ramp_up_strategy, self.ramp_up_end_rps)
        except ValueError as error:
            raise VLLMValidationError(
                f"--request-rate, --burstiness, --ramp-up-*: {error}"
            ) from None

    def headers(self) -> dict[str, str]:
        """Headers of every request; the key is that of the openai client, OPENAI_API_KEY."""
        key = os.environ.get("OPENAI_API_KEY")
        given = {"Authorization": f"Bearer {key}"} if key else {}
        headers = {**given, **_pairs("--header", self.header, "=")}
        for name, value in headers.items():
            if not f"{name}{value}".isprintable() or not f"{name}{value}".isascii():
                raise VLLMValidationError(f"--header {name}: expected printable ASCII characters")
        return headers

    def body(self) -> dict[str, Any]:
        """Keys that all bodies have."""
        values = {name: getattr(self, name) for name in _BODY_FIELDS}
        body = {name: value for name, value in values.items() if value is not None}
        if self.logprobs is not None and self.backend == "openai-chat":
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **(self.extra_body or {})}

    def shown_metrics(self) -> list[str]:
        names = _words(self.percentile_metrics)
        for name in names:
            if name not in METRICS:
                raise VLLMValidationError(
                    f"--percentile-metrics: unknown metric {name!r}; known: {', '.join(METRICS)}"
                )
        return names

    def percentiles(self) -> list[float]:
        try:
            values = [float(word) for word in _words(self.metric_percentiles)]
        except ValueError:
            values = [-1.0]
        if not all(0 <= value <= 100 for value in values):
            raise VLLMValidationError(
                f"--metric-percentiles: expected numbers in [0, 100], got {self.metric_percentiles}"
            )
        return values

    def goodput_levels(self) -> dict[str, float]:
        """Limits in ms per metric; empty when no service level is set."""
        levels = {}
        for name, text in _pairs("--goodput", self.goodput, ":").items():
            if name not in GOODPUT_METRICS:
                raise VLLMValidationError(
                    f"--goodput: unknown metric {name!r}; known: {', '.join(GOODPUT_METRICS)}"
                )
            try:
                levels[name] = float(text)
            except ValueError:
                raise VLLMValidationError(f"--goodput {name}: {text!r} is no number") from None
        return levels

    def result_metadata(self) -> dict[str, str]:
        return _pairs("--metadata", self.metadata, "=")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _pairs(flag: str, given: Sequence[str] | None, separator: str) -> dict[str, str]:
    pairs = {}
    for word in given or ():
        key, found, value = word.partition(separator)
        if not found or not key:
            raise VLLMValidationError(f"{flag}: expected KEY{separator}VALUE, got {word!r}")
        pairs[key] = value
    return pairs
