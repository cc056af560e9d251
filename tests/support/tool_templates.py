"""Chat templates that know tools: ChatML, with calls as each family of models writes them."""

from __future__ import annotations

_CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
TOOL_TEMPLATES = {
    "hermes": _CHATML.replace("CALL", f'<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>'),
    "llama": _CHATML.replace("CALL", f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}'),
    "mistral": _CHATML.replace("CALL", f'[TOOL_CALLS][{{"name": "{_NAME}", "arguments": {_ARGUMENTS}, "id": "I"}}]'),
    "mistral-args": _CHATML.replace("CALL", f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}"),
}
"""Name of the syntax -> template."""
