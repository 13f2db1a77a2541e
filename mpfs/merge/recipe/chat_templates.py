"""Chat templates that a recipe can name, and what passes for one that it spells out.

They are the formats as their makers describe them, in jinja; `docs/mergekit-compatibility.md` says where mergekit's
of the same names differ.
"""

from __future__ import annotations

from mpfs.merge.recipe.problems import near

AUTO = "auto"
"""Stands for the template that most of the models have."""

_SHORTEST = 20

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_MISTRAL = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\\n\\n' %}{% set turns = messages[1:] %}"
    "{% endif %}"
    "{{ bos_token }}"
    "{% for message in turns %}"
    "{% if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('after an optional system message, user and assistant must take turns') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)

_ALPACA = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '### Instruction:\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' }}{% endif %}"
    "{{ message['content'] | trim }}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages and messages[-1]['role'] != 'assistant' %}"
    "{{ '\\n\\n### Response:\\n' }}"
    "{% endif %}"
)

_EXAONE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '[|system|][|endofturn|]\\n' }}{% endif %}"
    "{{ '[|' + message['role'] + '|]' + message['content'] }}"
    "{{ '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
)

CHAT_TEMPLATES = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""The templates by name."""


def chat_template_problem(text: str) -> str | None:
    """What is wrong with a recipe's chat_template; None if it is `auto`, one of the names, or could be jinja."""
    if text == AUTO or text in CHAT_TEMPLATES or ("{" in text and len(text) >= _SHORTEST):
        return None
    names = [AUTO, *CHAT_TEMPLATES]
    return (
        f"{text!r} is none of {', '.join(names)}, and no jinja template (of {_SHORTEST} characters or more, with "
        f"braces){near(text.lower(), names)}"
    )


def chat_template_text(given: str) -> str:
    """The template that a recipe means by a name, or spells out."""
    return CHAT_TEMPLATES.get(given, given)
