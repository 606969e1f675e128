# SPDX-License-Identifier: Apache-2.0
"""Chat templates of the shapes that served families have, each as small as shows its demands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A template, and what its model card passes to it."""

    template: str
    #: whether it shows tools, calls and their results
    tools: bool = True
    #: key of a message under which it shows the reasoning beside calls; None without
    reasoning: str | None = None
    #: variables that the family's users set
    variables: tuple[tuple[str, Any], ...] = ()


_CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n"

_QWEN3 = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content is string %}<think>\n"
    "{{ m.reasoning_content.strip() }}\n</think>\n\n"
    "{% endif %}{{ content.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{% if content or not loop.first %}\n{% endif %}"
    "{% if c.function %}{% set c = c.function %}{% endif %}"
    '<tool_call>\n{"name": "{{ c.name }}", "arguments": '
    "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}"
    "{% endif %}"
    "}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n"
    "</tool_response><|im_end|>\n{% else %}" + _CHATML_TURN + "{% endif %}{% endfor %}"
) + (
    _CHATML_PROMPT + "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

#: calls as nested tags: the arguments must be a mapping
_TAGS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{% set t = t.function %}"
    "<function><name>{{ t.name }}</name>{% for k, v in t.parameters.properties | items %}"
    "<parameter>{{ k }} {{ v.type }}</parameter>{% endfor %}</function>{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "<think>\n{{ m.reasoning_content | default('', true) | trim }}\n</think>\n\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}" + _CHATML_TURN + "{% endif %}{% endfor %}"
) + (
    _CHATML_PROMPT + "<think>{% if enable_thinking is defined and not enable_thinking %}"
    "</think>{% endif %}{% endif %}"
)

_LLAMA = (
    "{% macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
    "{% if messages[0]['role'] == 'system' %}{{ head('system') + messages[0]['content'] | trim }}"
    "<|eot_id|>{% set messages = messages[1:] %}{% endif %}"
    "{% if tools is not none %}{{ head('user') }}{% for t in tools %}{{ t | tojson(indent=4) }}\n"
    "{% endfor %}{{ messages[0]['content'] | trim }}<|eot_id|>{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if not m.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}"
    "{% endif %}"
    "{% set c = m.tool_calls[0].function %}{{ head('assistant') }}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}<|eot_id|>"
    "{% else %}{{ head(m['role']) + m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)

_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}"
    "{% endif %}"
    "{{ c.function | tojson }}{{ c.id }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)

#: takes contents as parts, and turns that alternate
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}"
    "{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ first if loop.first else '' }}{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% elif m['content'] is iterable %}{% for item in m['content'] %}"
    "{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

#: reasoning beside a call is `thinking`, and a content is taken for it
_HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>namespace functions {{ '{' }}"
    "{% for t in tools %}\n"
    "type {{ t.function.name }} = (_: {% for k, v in t.function.parameters.properties.items() %}"
    "{{ k }}: {{ v.type }},{% endfor %}) => any;{% endfor %}}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}"
    "{{ raise_exception('content and thinking beside a call') }}{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{% elif m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% set c = m.tool_calls[0].function %}{% set last.name = c.name %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}"
    "{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_GRANITE = (
    "{% macro turn(role, text) %}<|start_of_role|>{{ role }}<|end_of_role|>"
    "{{ text }}<|end_of_text|>\n"
    "{% endmacro %}{% if tools %}<|start_of_role|>system<|end_of_role|>{% for t in tools %}"
    "{{ t | tojson }}\n{% endfor %}<|end_of_text|>\n{% endif %}{% for m in messages %}"
    "{% set content = m.content if m.content is string else "
    "m.content | map(attribute='text') | join %}"
    "{% if m.role == 'assistant' %}<|start_of_role|>assistant<|end_of_role|>{{ content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end_of_text|>\n'
    "{% elif m.role == 'tool' %}"
    "{{ turn('user', '<tool_response>' + content + '</tool_response>') }}"
    "{% else %}{{ turn(m.role, content) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

_NEMOTRON = (
    "{% if tools %}<SPECIAL_10>System\n<AVAILABLE_TOOLS>"
    "{{ tools | map(attribute='function') | list "
    "| tojson }}</AVAILABLE_TOOLS>\n{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<SPECIAL_11>Assistant\n"
    "{{ m['content'].split('</think>')[-1].strip() }}{% if m.tool_calls %}<TOOLCALL>["
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]</TOOLCALL>{% endif %}\n"
    "{% elif m['role'] == 'tool' %}<SPECIAL_11>User\n<TOOL_RESPONSE>[{{ m['content'] }}]"
    "</TOOL_RESPONSE>\n{% else %}<SPECIAL_11>{{ m['role'] | capitalize }}\n{{ m['content'] }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)

#: arguments are text, for they are concatenated
_DEEPSEEK = (
    "{% set ns = namespace(first=true) %}{{ bos_token }}{% if tools %}## Tools\n"
    "{% for t in tools %}"
    "{{ t.function.name }} {{ t.function.parameters | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['tool_calls'] %}"
    "{{ '<｜Assistant｜>' + (m['content'] or '') + '<｜tool▁calls▁begin｜>' }}"
    "{% for tool in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' "
    "+ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```' "
    "+ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
    "{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% else %}{{ m['content'] }}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{{ '<think>' if thinking | default(false) else '</think>' }}{% endif %}"
)

_KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>"
    "{{ tools | tojson(separators=(',', ':')) }}"
    "<|im_end|>{% endif %}{% for m in messages %}<|im_{{ m['role'] if m['role'] in "
    "('user', 'assistant') else 'system' }}|>{{ m.get('name') or m['role'] }}<|im_middle|>"
    "{% if m['role'] == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% elif m['content'] %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if m.get('tool_calls') %}<|tool_calls_section_begin|>{% for c in m['tool_calls'] %}"
    "<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
    "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}"
    "{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

_OLMO3 = (
    "{% if tools %}<|im_start|>system\nYou call functions.<functions>{{ tools | tojson }}"
    "</functions><|im_end|>\n{% endif %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "<|im_start|>system\n{{ m['content'] }}{% if m.get('functions', none) is not none %}"
    "<functions>{{ m['functions'] }}</functions>{% endif %}<|im_end|>\n"
    "{% elif m['role'] == 'assistant' %}"
    "<|im_start|>assistant\n{% if m.get('content', none) is not none %}{{ m['content'] }}"
    "{% endif %}"
    "{% if m.get('tool_calls', none) is not none %}<function_calls>{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] }}({% for k, v in c['function']['arguments'].items() %}"
    "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else '\n' }}"
    "{% endfor %}</function_calls>{% endif %}<|im_end|>\n{% elif m['role'] == 'tool' %}"
    "<|im_start|>environment\n{{ m['content'] }}<|im_end|>\n{% else %}"
    + _CHATML_TURN
    + "{% endif %}"
    "{% endfor %}" + _CHATML_PROMPT + "{% endif %}"
)

_PLAIN = "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_PROMPT + "{% endif %}"

_OFF = (("enable_thinking", False),)
SHAPES: dict[str, Shape] = {
    "qwen3": Shape(_QWEN3, reasoning="reasoning_content", variables=_OFF),
    "tags": Shape(_TAGS, reasoning="reasoning_content", variables=_OFF),
    "llama": Shape(_LLAMA),
    "mistral": Shape(_MISTRAL),
    "gemma": Shape(_GEMMA, tools=False),
    "harmony": Shape(_HARMONY, reasoning="thinking", variables=(("reasoning_effort", "high"),)),
    "granite": Shape(_GRANITE),
    "nemotron": Shape(_NEMOTRON, variables=_OFF),
    "deepseek": Shape(_DEEPSEEK, variables=(("thinking", True),)),
    "kimi": Shape(_KIMI),
    "olmo3": Shape(_OLMO3),
    "plain": Shape(_PLAIN, tools=False),
}

#: the shape of each family of tests/tiny_configs.py
FAMILY_SHAPES = {
    "llama": "llama",
    "llama3_rope": "llama",
    "qwen2": "qwen3",
    "qwen3": "qwen3",
    "qwen3_sliding": "qwen3",
    "qwen3_5": "tags",
    "qwen3_5_tied": "tags",
    "qwen3_5_wide": "tags",
    "qwen3_5_wrapper": "tags",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
    "bamba": "plain",
    "falcon_h1": "qwen3",
    "granite_h": "granite",
    "granite_h_dense": "granite",
    "nemotron_h": "nemotron",
    "nemotron_h_moe": "tags",
    "gpt_oss": "harmony",
    "gemma3": "gemma",
    "gemma3_wrapper": "gemma",
    "olmo_hybrid": "olmo3",
    "qwen3_5_moe": "tags",
    "qwen3_5_moe_wrapper": "tags",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v4": "deepseek",
    "kimi_linear": "kimi",
}
