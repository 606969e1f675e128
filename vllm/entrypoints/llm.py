# SPDX-License-Identifier: Apache-2.0
"""`LLM`: offline generation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeVar

from tqdm import tqdm

from vllm import envs
from vllm.beam_search import BeamSearchOutput
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.conversation import ConversationRenderer
from vllm.entrypoints.shared_engine import SharedEngine
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, TokensPrompt
from vllm.lora.request import LoRARequest, check_no_lora
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.utils import startup_phases
from vllm.utils.imports import gc_paused
from vllm.v1.engine.no_pooling import no_pooling
from vllm.v1.engine.request_batch import RequestBatch
from vllm.v1.engine.sleep import check_sleep
from vllm.v1.engine.spare_process import prestarted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.explain import Explanation
    from vllm.v1.metrics.reader import Metric


_TEXT = "generate, chat or beam_search"


class LLMRefusals:
    """Base of `LLM`. Every method raises `NotImplementedError`."""

    encode = no_pooling("LLM.encode", _TEXT)
    embed = no_pooling("LLM.embed", _TEXT)
    classify = no_pooling("LLM.classify", _TEXT)
    score = no_pooling("LLM.score", _TEXT)
    reward = no_pooling("LLM.reward", _TEXT)

    def start_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("profiling is not supported; use an external profiler")

    def stop_profile(self) -> NoReturn:
        self.start_profile()


R = TypeVar("R")
Messages = list[dict[str, Any]]
#: False, True, or what makes the bar, called like `tqdm.tqdm`
UseTqdm: TypeAlias = "bool | Callable[..., tqdm[Any]]"


class LLM(LLMRefusals):
    """A model that generates for lists of prompts.

    Keywords are the fields of `EngineArgs`; an unknown one is a `TypeError`. Statistics are off
    unless `disable_log_stats=False`, which `get_metrics` needs. `chat_template`: inline Jinja or a
    path, instead of the tokenizer's.

    Several threads may use it at once: their requests run together. A forked child may not: its
    calls raise `RuntimeError`.
    """

    def __init__(
        self,
        model: str,
        *,
        chat_template: str | None = None,
        disable_log_stats: bool = True,
        **kwargs: Any,
    ) -> None:
        startup_phases.begin(startup_phases.IMPORT)
        # The engine's process imports what it needs while this one does.
        with prestarted() if envs.VLLM_ENABLE_V1_MULTIPROCESSING else nullcontext():
            with gc_paused():
                from vllm.engine.arg_utils import EngineArgs
                from vllm.engine.batch_defaults import UsageContext
                from vllm.v1.engine.llm_engine import LLMEngine
            startup_phases.end(startup_phases.IMPORT)
            args = EngineArgs(model=model, disable_log_stats=disable_log_stats, **kwargs)
            self.llm_engine = LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS)
        self._shared = SharedEngine(self.llm_engine)
        self.model_config = self.llm_engine.model_config
        self._chat_template = load_chat_template(chat_template)
        self._request_ids = itertools.count()
        self._default_params: dict[str, Any] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An `LLM` with the given arguments."""
        names = [field.name for field in dataclasses.fields(engine_args)]
        return cls(**{name: getattr(engine_args, name) for name in names})

    def shutdown(self) -> None:
        """Stop the engine and free its memory, as deleting the object does."""
        self.llm_engine.shutdown()

    # ---- generation ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list; results are in the order of the prompts.

        Raises `VLLMValidationError` (a `ValueError`) for a bad prompt or parameter; then nothing
        runs. A list of parameters, priorities or adapters needs one entry per prompt.
        """
        if mm_processor_kwargs:
            raise VLLMValidationError(
                "mm_processor_kwargs: multimodal input is not supported", "mm_processor_kwargs"
            )
        items = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _per_prompt("sampling_params", sampling_params, len(items), SamplingParams)
        adapters = _per_prompt("lora_request", lora_request, len(items), LoRARequest)
        priorities = _per_prompt("priority", 0 if priority is None else priority, len(items), int)
        ids: list[str] = []
        finished: list[RequestOutput] = []
        config = self.llm_engine.vllm_config
        batch = RequestBatch(
            config.scheduler_config,
            self.llm_engine.send_requests,
            len(config.parallel_config.local_ranks),
        )
        try:
            for item, param, adapter, rank in zip(items, params, adapters, priorities, strict=True):
                param = param.clone()
                param.output_kind = RequestOutputKind.FINAL_ONLY
                with self._shared.turn:
                    ids.append(str(next(self._request_ids)))
                    self._shared.expect(ids[-1], finished)
                    batch.add(
                        self.llm_engine.prepare_request(
                            ids[-1],
                            item,
                            param,
                            lora_request=adapter,
                            tokenization_kwargs=tokenization_kwargs,
                            priority=rank,
                        )
                    )
            with self._shared.turn:
                batch.send()
            with _bar(use_tqdm, len(ids), "Generating", "req") as bar:
                return self._shared.wait(ids, finished, bar.update)
        except BaseException:
            self._shared.abandon(ids)
            raise

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of each of a list.

        `tool_choice`: as in the chat API; it decides which `tools` the template sees, and a forced
        call is the JSON that the reply must be. What the model writes is returned as it is.
        """
        if add_generation_prompt and continue_final_message:
            raise VLLMValidationError(
                "add_generation_prompt and continue_final_message cannot both be set",
                "add_generation_prompt",
            )
        if tool_choice is not None:
            from vllm.entrypoints.openai import tool_choice as choices

            tools, tool_choice = choices.only_allowed(tools, tool_choice)
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            choice = choices.choose_tools(tools, tool_choice)
            sampling_params = choices.with_forced_calls(sampling_params, choice)
        tokenizer = self.get_tokenizer()
        given = chat_template_content_format
        renderer = ConversationRenderer.make(
            tokenizer,
            load_chat_template(chat_template) or self._chat_template,
            tools,
            content_format=None if given == "auto" else given,
            template_kwargs=chat_template_kwargs,
        )
        prompts: list[PromptType] = []
        for conversation in _as_conversations(messages):
            parsed = renderer.parse(conversation)
            text = renderer.render(parsed, add_generation_prompt, continue_final_message)
            with self._shared.turn:  # a request's own truncation changes the tokenizer for a while
                token_ids = renderer.encode(text)
            prompts.append(TokensPrompt(prompt_token_ids=token_ids, prompt=text))
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first.

        `concurrency_limit`: most prompts searched at once. Each step scores every beam as a request
        of its own; with prefix caching at most its last block is computed anew.
        """
        check_no_lora(lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise VLLMValidationError(
                f"concurrency_limit must be at least 1, got {concurrency_limit}",
                "concurrency_limit",
                concurrency_limit,
            )
        processor = self.llm_engine.input_processor
        from vllm.entrypoints.offline_beam_search import run_beam_searches, start_beam_search

        with self._shared.turn:
            searches = [start_beam_search(processor, item, params) for item in _as_prompts(prompts)]
        with _bar(use_tqdm, len(searches), "Beam search", "prompt") as bar:
            run_beam_searches(
                lambda items, each: self.generate(items, each, use_tqdm=False),
                searches,
                concurrency_limit or len(searches),
                bar,
            )
        outputs = [search.output() for search in searches]
        if (tokenizer := self.llm_engine.tokenizer) is not None:
            for sequence in (s for output in outputs for s in output.sequences):
                sequence.text = str(tokenizer.decode(sequence.tokens))
        return outputs

    # ---- what the model is ---------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; `ValueError` with `skip_tokenizer_init`."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters with the defaults of the checkpoint's generation config."""
        if self._default_params is None:
            self._default_params = self.model_config.get_diff_sampling_param()
        return SamplingParams.from_optional(**self._default_params)

    def get_metrics(self) -> list[Metric]:
        """A snapshot of the metrics; needs `disable_log_stats=False`."""
        return self.llm_engine.get_metrics()

    def explain(self, lengths: Sequence[int] | None = None) -> Explanation:
        """What this engine allocated, what requests of `lengths` tokens cost and what fits; the
        report of `vllm explain`. ValueError for a length outside `1..max_model_len`."""
        from vllm.v1.core.explain import explain

        return explain(self.llm_engine.vllm_config, lengths=lengths)

    # ---- workers -------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., R],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[R]:
        """Call a worker method by name, or `method(worker, ...)`; one result per worker.

        A callable is sent to the engine's process only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        with self._shared.turn:
            return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], R]) -> list[R]:
        """`func(model)` on every worker; the same rule for callables applies."""
        with self._shared.turn:
            return self.llm_engine.apply_model(func)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False if blocks in use stopped it."""
        with self._shared.turn:
            return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def change_placement(self, placement: Sequence[str] | str) -> list[dict[int, str]]:
        """Use other mixers of a supernet: a name for each layer, or `all-X`, `everyNth-X`,
        `bookend-attn-X`, or an alias. Returns them by layer, from every worker.

        All state is dropped; weights of the mixers in use are on the device, others in host memory,
        and memory is planned for the former. Raises `VLLMValidationError` for a placement that the
        model does not have or whose state does not fit, and while requests of other threads run,
        another error if the change fails on the way (no room on the device or the host); nothing is
        changed then.
        """
        with self._shared.turn:
            return self.llm_engine.change_placement(placement)

    # ---- sleeping ------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`; needs `enable_sleep_mode=True`.

        Level 1 moves the weights to host memory and drops all state; level 2 drops the weights
        too. Requests are refused meanwhile; those that run in other threads end with "abort".
        """
        check_sleep(self.llm_engine.vllm_config, level)
        with self._shared.turn:
            self._shared.deliver(self.llm_engine.abort_all())
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights" (after level 2 from the checkpoint), "kv_cache", or both (None)."""
        with self._shared.turn:
            self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()


def _bar(use_tqdm: UseTqdm, total: int, desc: str, unit: str) -> tqdm[Any]:
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=desc, unit=unit, disable=not use_tqdm, dynamic_ncols=True)


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt, in whatever form, becomes a list of one."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a text, token ids, a prompt object or a list of them, got {prompts!r}"
        )
    items = list(prompts)
    if items and type(items[0]) is int:
        return [items]
    return items


def _as_conversations(messages: Any) -> list[Messages]:
    items = list(messages)
    if items and isinstance(items[0], dict):
        return [items]
    return items


def _per_prompt(name: str, value: Any, count: int, kind: type) -> list[Any]:
    """One value for all prompts, or a list of `count`."""
    if value is None or isinstance(value, kind):
        return [value] * count
    values = list(value) if isinstance(value, Sequence) else [value]
    if strange := [one for one in values if one is not None and not isinstance(one, kind)]:
        raise TypeError(f"{name} must be {kind.__name__} or a list of them, got {strange[0]!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values
