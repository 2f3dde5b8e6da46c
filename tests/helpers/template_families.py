"""Short versions of public chat templates, and word-level tokenizers that use them.

They are written from rendered conversations of the models. They keep everything that decides where
an answer begins and ends, and shorten long instructions to a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday " + date_string + "\\n\\n" }}
{%- if tools %}{%- for t in tools %}{{- t | tojson }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

LLAMA4 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|header_start|>ipython<|header_end|>\\n\\n" + message.content | tojson + "<|eot|>" }}
    {%- elif message.tool_calls %}
        {{- '<|header_start|>assistant<|header_end|>\\n\\n<|python_start|>' + message.content }}
        {{- '<|python_end|>' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + "}" }}
        {%- endfor %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

_QWEN_TOOLS = """\
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
"""
_QWEN_TOOL_TURN = """\
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
"""
_QWEN_HEAD = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif default_system %}
    {{- '<|im_start|>system\\nYou are Qwen<|im_end|>\\n' }}
{%- endif %}
"""

QWEN25 = (
    "{%- set default_system = true %}\n"
    + _QWEN_HEAD
    + """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + content }}
"""
    + _QWEN_TOOLS
    + _QWEN_TOOL_TURN
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN3 = (
    _QWEN_HEAD
    + """\
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
"""
    + _QWEN_TOOLS
    + _QWEN_TOOL_TURN
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)

HARMONY = """\
{{- "<|start|>system<|message|>You are ChatGPT\\n\\nReasoning: " }}
{{- (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- if messages[0].role == "system" %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content + "<|end|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set called = namespace(name="") %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {{- "<|start|>assistant to=functions." + called.name }}
        {{- "<|channel|>commentary json<|message|>" }}
        {{- message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
    {%- elif message.role == "assistant" and loop.last and not add_generation_prompt %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate") }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

_DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- else %}{{- ANSWER + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- PROMPT }}{%- endif %}"""


def _deepseek(answer: str, prompt: str) -> str:
    return _DEEPSEEK.replace("ANSWER", answer).replace("PROMPT", prompt)


DEEPSEEK_V3 = _deepseek("'<｜Assistant｜>' + message.content", "'<｜Assistant｜>'")
DEEPSEEK_R1 = _deepseek(
    "'<｜Assistant｜>' + message.content.split('</think>')[-1]", "'<｜Assistant｜><think>\\n'"
)
DEEPSEEK_V31 = _deepseek(
    "'<｜Assistant｜></think>' + message.content",
    "'<｜Assistant｜>' + ('<think>' if thinking_mode is defined and thinking_mode else '</think>')",
)

QWQ = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

GEMMA4 = """\
{{- bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{%- if thinks %}{{- '<|turn>system\\n<|think|>\\n<turn|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content.split('<channel|>')[-1] | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' + ('' if thinks else '<|channel>thought\\n<channel|>') }}
{%- endif %}"""

KIMI_K3 = """\
{%- macro close(tag) %}{{- '<|close|>' + tag + '<|sep|>' }}{%- endmacro %}
{%- for message in messages %}
    {{- '<|open|>message role="' + message.role + '"<|sep|>' }}
    {%- if message.role == "assistant" %}
        {{- '<|open|>think<|sep|>' + message.reasoning_content | default('') + close('think') }}
        {{- '<|open|>response<|sep|>' + message.content + close('response') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- close('message') + '<|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>' }}
{%- endif %}"""

IDEFICS3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message.role + ':' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'text' %}{{- ' ' + part['text'] }}{%- endif %}
    {%- endfor %}
    {{- '<end_of_utterance>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

GLM45 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == "assistant" %}
        {{- '\\n<think>' + message.reasoning_content | default('') + '</think>' }}
    {%- endif %}
    {{- '\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template and the added tokens of its tokenizer; the closing tag is the first one."""

    template: str
    special: tuple[str, ...]
    not_special: tuple[str, ...] = ()
    bos: str | None = None


_LLAMA3_TOKENS = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA4_TOKENS = (
    *("<|eot|>", "<|begin_of_text|>", "<|header_start|>", "<|header_end|>"),
    *("<|python_start|>", "<|python_end|>"),
)
_QWEN_NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_QWEN = (("<|im_end|>", "<|im_start|>"), _QWEN_NOT_SPECIAL)
_HARMONY_TOKENS = tuple(
    f"<|{n}|>" for n in ("return", "start", "message", "end", "channel", "call")
)
_MISTRAL_TOKENS = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_DEEPSEEK_TOKENS = (
    ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    "<｜begin▁of▁sentence｜>",
)
_GEMMA4_TOKENS = (*("<turn|>", "<bos>", "<|turn>", "<|think|>", "<|channel>", "<channel|>"),)

FAMILIES = {
    "llama3": Family(LLAMA3, _LLAMA3_TOKENS, bos="<|begin_of_text|>"),
    "llama4": Family(LLAMA4, _LLAMA4_TOKENS, bos="<|begin_of_text|>"),
    "qwen2.5": Family(QWEN25, *_QWEN),
    "qwen3": Family(QWEN3, *_QWEN),
    "gpt-oss": Family(HARMONY, _HARMONY_TOKENS),
    "gemma": Family(GEMMA, ("<end_of_turn>", "<bos>", "<start_of_turn>"), bos="<bos>"),
    "mistral": Family(MISTRAL, _MISTRAL_TOKENS, bos="<s>"),
    "deepseek-v3": Family(DEEPSEEK_V3, *_DEEPSEEK_TOKENS),
    "deepseek-v3.1": Family(DEEPSEEK_V31, *_DEEPSEEK_TOKENS),
    "deepseek-r1": Family(DEEPSEEK_R1, *_DEEPSEEK_TOKENS),
    "qwq": Family(QWQ, *_QWEN),
    "gemma4": Family(GEMMA4, _GEMMA4_TOKENS, bos="<bos>"),
    "idefics3": Family(IDEFICS3, ("<end_of_utterance>", "<bos>"), bos="<bos>"),
    "glm4.5": Family(GLM45, ("<|user|>", "<|assistant|>"), ("<think>", "</think>")),
    "kimi-k3": Family(KIMI_K3, ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")),
}
_WORDS = r"\n\n|\n| |\w+|[^\w\s]"


def family_tokenizer(name: str, texts: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words, spaces and signs of a template and of `texts`."""
    family = FAMILIES[name]
    words = sorted({*re.findall(_WORDS, family.template + texts), "\n\n", "\n", " ", "\\", "n"})
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, "?"])}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True) for t in family.special])
    backend.add_tokens([AddedToken(t, special=False) for t in family.not_special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.special[0],
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
        chat_template=family.template,
    )
