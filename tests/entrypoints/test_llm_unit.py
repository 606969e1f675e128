# SPDX-License-Identifier: Apache-2.0
"""`LLM` over the fake executor."""

from __future__ import annotations

import gc
import random

import pytest
from transformers import GenerationConfig, LlamaConfig

from tests.v1.engine.fakes import FakeExecutor, expected_tokens
from tests.v1.engine.tokenizer_fixture import make_tokenizer
from vllm import LLM, EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.reader import Counter, Gauge, Histogram

VOCAB = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, eos_token_id=[0, 11]
    ).save_pretrained(path)
    return str(path)


@pytest.fixture
def make_llm(model, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(Executor, "get_class", staticmethod(lambda config: FakeExecutor))
    return lambda **kwargs: LLM(model, num_gpu_blocks_override=100, max_num_seqs=8, **kwargs)


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, VOCAB), k=length)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_results_in_input_order_with_params_per_prompt(make_llm):
    llm = make_llm()
    prompts = [prompt_of(i, 30 - i) for i in range(12)]
    params = [SamplingParams(max_tokens=1 + i * 3, ignore_eos=True) for i in range(12)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert tokens_of(outputs) == [
        expected_tokens(p, s, 256) for p, s in zip(prompts, params, strict=True)
    ]
    assert params[0].output_kind.name == "CUMULATIVE"  # the caller's object is untouched


def test_forms_of_prompts(make_llm):
    llm = make_llm()
    ids = llm.get_tokenizer().encode("hello world")
    params = SamplingParams(max_tokens=3)
    expected = tokens_of(llm.generate([ids], params))
    for prompts in ("hello world", ids, {"prompt": "hello world"}, ["hello world"], [ids]):
        outputs = llm.generate(prompts, params)
        assert tokens_of(outputs) == expected
    assert llm.generate([], params) == []


def test_mismatched_lists_and_bad_prompts_leave_no_request_behind(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="priority"):
        llm.generate([[1], [2]], SamplingParams(), priority=[1])
    with pytest.raises(VLLMValidationError, match="outside the vocabulary"):
        llm.generate([[1], [VOCAB]], SamplingParams())
    with pytest.raises(TypeError, match="prompts must be a text.* got b'hi'"):
        llm.generate(b"hi")
    with pytest.raises(VLLMValidationError, match="messages.0: a message must be an object, got"):
        llm.chat("hi")
    with pytest.raises(TypeError, match="prompts must be a text"):
        llm.generate(None, SamplingParams())
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate([[1], [2]], {"max_tokens": 2})
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate([[1], [2]], SamplingParams(max_tokens=2))) == 2


def test_unknown_keyword_and_unsupported_sizes(model):
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(model, no_such_option=1)
    with pytest.raises(ValueError, match="--nnodes 2: .* 2 do not divide 1"):
        LLM(model, nnodes=2)


#: every documented keyword, with a value that a caller may pass
KEYWORDS = {
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "runner": "auto",
    "convert": "auto",
    "tensor_parallel_size": 1,
    "dtype": "float32",
    "quantization": None,
    "seed": 0,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1 << 24,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "enforce_eager": True,
    "compilation_config": 0,
    "disable_custom_all_reduce": False,
    "load_format": "dummy",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 256,
    "async_scheduling": False,
    "disable_hybrid_kv_cache_manager": False,
    "speculative_config": None,
    "kv_transfer_config": None,
    "hf_overrides": lambda config: config,
    "disable_log_stats": False,
    "distributed_executor_backend": None,
    "distributed_timeout_seconds": None,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "nnodes": 1,
    "node_rank": 0,
    "worker_extension_cls": "",
    "data_parallel_size": 1,
    "enable_lora": False,
    "max_lora_rank": 16,
    "limit_mm_per_prompt": {},
    "mm_processor_kwargs": None,
    "allowed_local_media_path": "",
    "pooler_config": None,
    "logits_processors": None,
    "hf_token": None,
    "cpu_offload_gb": 0,
    "profiler_config": None,
    "structured_outputs_config": None,
    "attention_config": None,
    "swap_space": 4,
    "enable_sleep_mode": False,
}


def test_every_documented_keyword(make_llm):
    llm = make_llm(**KEYWORDS)
    config = llm.llm_engine.vllm_config
    assert config.model_config.max_model_len == 128 and llm.model_config is config.model_config
    assert config.load_config.load_format == "dummy"
    assert not config.scheduler_config.async_scheduling
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_from_engine_args_and_shutdown(make_llm, model):
    make_llm()  # replaces the executor
    args = EngineArgs(model=model, num_gpu_blocks_override=50, max_num_seqs=4, seed=7)
    llm = LLM.from_engine_args(args)
    assert llm.model_config.seed == 7
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 4
    executor = llm.llm_engine.engine_core.engine_core.executor
    llm.shutdown()
    assert executor.is_shut_down


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "reward"])
def test_pooling_is_refused_with_what_to_use(make_llm, method):
    llm = make_llm()
    with pytest.raises(NotImplementedError, match=rf"LLM.{method} needs a pooling.*beam_search"):
        getattr(llm, method)(["a"], ["b"])
    with pytest.raises(NotImplementedError, match="external profiler"):
        llm.stop_profile()


def test_default_parameters_come_from_the_checkpoint(make_llm):
    llm = make_llm()
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.6, 20)
    assert llm.generate("hello")[0].finished
    processed = llm.llm_engine.input_processor.process("a", [1], SamplingParams())
    assert processed.request.sampling_params.stop_token_ids == [11]


def test_chat(make_llm):
    llm = make_llm()
    tokenizer = llm.get_tokenizer()
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt == "<|user|>hello<|end|><|assistant|>"
    assert output.prompt_token_ids == tokenizer.encode(output.prompt, add_special_tokens=False)
    closed = llm.chat([conversation] * 2, SamplingParams(max_tokens=1), add_generation_prompt=False)
    assert [o.prompt for o in closed] == ["<|user|>hello<|end|>"] * 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert llm.chat(parts, SamplingParams(max_tokens=1))[0].prompt.startswith("<|user|>hi")
    custom = llm.chat(
        conversation,
        SamplingParams(max_tokens=1),
        chat_template="{{ messages[0].content }}\n{{ mood }}{{ tools | length }}",
        chat_template_kwargs={"mood": "fine"},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )
    assert custom[0].prompt == "hello\nfine1"
    with pytest.raises(ValueError, match="cannot both be set"):
        llm.chat(conversation, add_generation_prompt=True, continue_final_message=True)


def test_a_choice_of_tools_decides_what_is_shown_and_what_the_reply_must_be(make_llm, monkeypatch):
    llm = make_llm(chat_template="{{ tools | map(attribute='function.name') | join(' ') }}")
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    given = SamplingParams(max_tokens=9)
    monkeypatch.setattr(
        llm, "generate", lambda prompts, params, **_: (prompts[0]["prompt"], params)
    )

    def chat(choice, params=given):
        return llm.chat([{"role": "user", "content": "a"}], params, tools=tools, tool_choice=choice)

    allowed = {"mode": "required", "tools": [tools[0], tools[2]]}
    shown, params = chat({"type": "allowed_tools", "allowed_tools": allowed})
    assert shown == "f h" and given.structured_outputs is None and params.max_tokens == 9
    assert [name in params.structured_outputs.json for name in ('"f"', '"g"', '"h"')] == [1, 0, 1]
    assert chat({"type": "allowed_tools", "allowed_tools": allowed | {"mode": "auto"}}) == (
        shown,
        given,
    )
    assert chat("auto") == ("f g h", given)
    shown, (first, second) = chat(tools[1], [given, SamplingParams(max_tokens=8)])
    assert shown == "f g h" and [first.max_tokens, second.max_tokens] == [9, 8]
    assert first.structured_outputs == second.structured_outputs
    assert chat("required", None)[1].temperature == 0.6
    with pytest.raises(VLLMValidationError, match="cannot be combined with a forced call"):
        chat("required", params)


def test_continue_final_message(make_llm):
    llm = make_llm()
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "brown"}]
    (output,) = llm.chat(
        conversation,
        SamplingParams(max_tokens=1),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.prompt == "<|user|>a<|end|><|assistant|>brown"


def test_progress_bar_counts_requests(make_llm):
    from tqdm import tqdm

    bars = []

    def make_bar(**kwargs):
        bars.append(tqdm(**kwargs))
        return bars[-1]

    make_llm().generate([[1], [2], [3]], SamplingParams(max_tokens=2), use_tqdm=make_bar)
    assert bars[0].n == 3


def test_metrics(make_llm):
    llm = make_llm(disable_log_stats=False)
    prompt = prompt_of(0, 40)
    llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(found["vllm:generation_tokens"], Counter)
    assert found["vllm:generation_tokens"].value == 8
    assert found["vllm:prompt_tokens"].value == 80
    assert found["vllm:prefix_cache_queries"].value == 80
    assert found["vllm:prefix_cache_hits"].value == 32
    assert isinstance(found["vllm:num_requests_running"], Gauge)
    assert found["vllm:num_requests_running"].value == 0
    ttft = found["vllm:time_to_first_token_seconds"]
    assert isinstance(ttft, Histogram) and ttft.count == ttft.buckets["+Inf"] == 2
    with pytest.raises(ValueError, match="disable_log_stats"):
        make_llm().get_metrics()


def test_workers_and_cache(make_llm):
    llm = make_llm()
    assert llm.collective_rpc("echo", args=(1,), kwargs={"x": 2})[0][2:] == ((1,), {"x": 2})
    assert llm.collective_rpc(lambda worker: worker.num_steps) == [0]
    assert llm.reset_prefix_cache() is True
    with pytest.raises(VLLMValidationError, match="enable_sleep_mode"):
        llm.sleep()
    assert not llm.is_sleeping()


def test_several_engines_one_after_the_other(make_llm):
    expected = None
    for _ in range(3):
        llm = make_llm(disable_log_stats=False)
        executor = llm.llm_engine.engine_core.engine_core.executor
        tokens = tokens_of(llm.generate([prompt_of(0, 9)], SamplingParams(max_tokens=5)))
        expected = expected or tokens
        assert tokens == expected
        del llm
        gc.collect()
        assert executor.is_shut_down


def test_over_a_process(make_llm, monkeypatch, forking):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = make_llm()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompt = prompt_of(0, 9)
    assert tokens_of(llm.generate([prompt], params)) == [expected_tokens(prompt, params, 256)]
    assert llm.model_config.max_model_len == 256
    llm.llm_engine.engine_core.shutdown()


def test_prompts_of_one_call_are_sent_together(make_llm, monkeypatch):
    llm = make_llm()
    client = llm.llm_engine.engine_core
    sent, add = [], client.add_requests
    monkeypatch.setattr(
        client,
        "add_requests",
        lambda r: (sent.append([one.sampling_params.n for one in r]), add(r)),
    )
    prompts = [{"prompt_token_ids": prompt_of(i, 20)} for i in range(3)]
    params = [SamplingParams(n=n, max_tokens=2) for n in (1, 3, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1, 3, 1]
    assert sent == [[1, 3, 1]]
