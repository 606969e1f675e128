# SPDX-License-Identifier: Apache-2.0
"""Chat templates of Hugging Face tokenizers: choosing one, and inspecting it."""

import functools
from collections.abc import Container
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import ModelConfig

ContentFormat = Literal["string", "openai"]

#: a template that asks one of these of a value has a branch for each form of it
_TYPE_TESTS = ("string", "mapping")


def resolve_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    model_config: "ModelConfig | None" = None,
) -> str | None:
    """The Jinja text to use: the given one (or the tokenizer's template of that name), else the
    tokenizer's own; None when the tokenizer has none.

    `model_config` is accepted for callers that pass it; the choice does not depend on it.
    """
    del model_config
    own = tokenizer.chat_template
    if chat_template is not None and not (isinstance(own, dict) and chat_template in own):
        return chat_template
    if not own:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)


def require_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
) -> str:
    """`resolve_chat_template`, or an error that says what to do."""
    template = resolve_chat_template(tokenizer, chat_template, tools)
    if template is None:
        raise VLLMValidationError(
            "this model's tokenizer has no chat template; start the server with --chat-template, "
            "or use /v1/completions",
            parameter="messages",
        )
    return template


@functools.lru_cache(maxsize=64)
def detect_content_format(chat_template: str) -> ContentFormat:
    """`openai` when the template loops over the parts of a message's content, else `string`."""
    tree = parse_template(chat_template)
    contents = _assigned(tree, "content")
    for loop in tree.find_all(jinja2.nodes.For):
        if _reads(_unfiltered(loop.iter), "content", contents):
            return "openai"
    return "string"


@functools.lru_cache(maxsize=64)
def takes_arguments_as_text(chat_template: str) -> bool:
    """Whether the template writes a call's arguments as they are, so that they must be JSON text.

    It does so when it prints or concatenates them without a filter, and never asks whether they
    are text.
    """
    tree = parse_template(chat_template)
    names = _assigned(tree, "arguments")
    for test in tree.find_all(jinja2.nodes.Test):
        if test.name in _TYPE_TESTS and _reads(test.node, "arguments", names):
            return False
    joined = [[node.left, node.right] for node in tree.find_all(jinja2.nodes.Add)]
    joined += [node.nodes for node in tree.find_all(jinja2.nodes.Concat)]
    joined += [node.nodes for node in tree.find_all(jinja2.nodes.Output)]
    return any(_reads(part, "arguments", names) for parts in joined for part in parts)


@functools.lru_cache(maxsize=64)
def knows_developers(chat_template: str) -> bool:
    """Whether the template compares with the role `developer`, a newer name of `system`."""
    constants = parse_template(chat_template).find_all(jinja2.nodes.Const)
    return any(constant.value == "developer" for constant in constants)


def parse_template(chat_template: str) -> jinja2.nodes.Template:
    """The syntax tree; `VLLMValidationError` where there is none."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    try:
        return environment.parse(chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise VLLMValidationError(
            f"the chat template is not valid Jinja: {error}", parameter="chat_template"
        ) from None


def _assigned(tree: jinja2.nodes.Template, key: str) -> set[str]:
    """Variables that are set to the entry `key` of something."""
    return {
        assign.target.name
        for assign in tree.find_all(jinja2.nodes.Assign)
        if isinstance(assign.target, jinja2.nodes.Name) and _reads(_unfiltered(assign.node), key)
    }


def _unfiltered(node: jinja2.nodes.Node) -> jinja2.nodes.Node:
    while isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _reads(node: jinja2.nodes.Node, key: str, variables: Container[str] = ()) -> bool:
    """Whether `node` is `<something>.key`, `<something>["key"]` or one of `variables`."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == key
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == key
    return isinstance(node, jinja2.nodes.Name) and node.name in variables


class _GenerationTag(jinja2.ext.Extension):
    """Parses transformers' `{% generation %}` blocks, transparent for this analysis."""

    tags = {"generation"}

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
