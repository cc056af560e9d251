"""Chat templates that know tools: ChatML, with calls as each family of models writes them.

How parameters are written one by one is cut out of the templates of Qwen3.5-2B, Gemma 4 (both Apache 2.0), GLM-4.6 and
MiniMax M3 (MIT).
"""

from __future__ import annotations

_CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
_QWEN_XML = """{%- set tool_call = call.function %}
{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for args_name, args_value in tool_call.arguments|items %}
    {{- '<parameter=' + args_name + '>\\n' }}
    {%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
    {{- args_value }}
    {{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
"""  # noqa: E501
_GLM = """{% set tc = call.function %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments or {} %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>"""
_MINIMAX = """{%- macro to_xml(val, ns) -%}
{%- if val is mapping -%}
{%- for k, v in val.items() if v is not none -%}
{{ ns }}<{{ k }}>{{ to_xml(v, ns) }}{{ ns }}</{{ k }}>
{%- endfor -%}
{%- elif val is iterable and val is not string -%}
{%- for item in val -%}
{{ ns }}<item>{{ to_xml(item, ns) }}{{ ns }}</item>
{%- endfor -%}
{%- elif val is boolean -%}
{{ val | tojson }}
{%- else -%}
{{ val }}
{%- endif -%}
{%- endmacro -%}
{%- set ns = ']<]minimax[>[' -%}
{{- ns + '<tool_call>\\n' if loop.first else '' -}}
{{- ns + '<invoke name="' + call.function.name + '">' -}}
{{- to_xml(call.function.arguments, ns) + ns + '</invoke>\\n' -}}
{{- ns + '</tool_call>' if loop.last else '' -}}"""
_MINICPM = """{{- '<function name="' ~ call.function.name ~ '">' }}
{%- for name, value in call.function.arguments.items() %}
    {{- '<param name="' ~ name ~ '">' }}
    {%- if value is string and ('<' in value or '&' in value or '\\n' in value) %}
        {{- '<![CDATA[' + value + ']]>' }}
    {%- else %}
        {{- value if value is string else value | tojson }}
    {%- endif %}
    {{- '</param>' }}
{%- endfor %}
{{- '</function>' }}"""
_FUNCTIONARY = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% if message.content %}>>>all
{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}>>>{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}
{%- else %}{{ message.content }}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
>>>{% endif %}"""
_GEMMA = """{%- macro format_argument(argument) -%}
    {%- if argument is string -%}
        {{- '<|"|>' + argument + '<|"|>' -}}
    {%- elif argument is mapping -%}
        {{- '{' -}}
        {%- for key, value in argument | dictsort -%}
            {{- key + ':' + format_argument(value) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif argument is iterable -%}
        {{- '[' -}}
        {%- for item in argument -%}
            {{- format_argument(item) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- argument -}}
    {%- endif -%}
{%- endmacro -%}
{%- set function = call['function'] -%}
{{- '<|tool_call>call:' + function['name'] + '{' -}}
{%- set ns_args = namespace(found_first=false) -%}
{%- for key, value in function['arguments'] | dictsort -%}
    {%- if ns_args.found_first %},{% endif -%}
    {%- set ns_args.found_first = true -%}
    {{- key -}}:{{- format_argument(value) -}}
{%- endfor -%}
{{- '}<tool_call|>' -}}
{%- for tool_response in message['tool_responses'] -%}
    {{- '<|tool_response>' -}}
    {{- 'response:' + tool_response['name'] | default('unknown') + '{value:' -}}
    {{- format_argument(tool_response['response']) + '}' -}}
    {{- '<tool_response|>' -}}
{%- endfor -%}"""
# As in gpt-oss's (Apache 2.0).
_HARMONY = f"<|start|>assistant to=functions.{_NAME}<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>"
TOOL_TEMPLATES = {
    "hermes": _CHATML.replace("CALL", f'<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>'),
    "llama": _CHATML.replace("CALL", f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}'),
    "mistral": _CHATML.replace("CALL", f'[TOOL_CALLS][{{"name": "{_NAME}", "arguments": {_ARGUMENTS}, "id": "I"}}]'),
    "mistral-args": _CHATML.replace("CALL", f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}"),
    "qwen-xml": _CHATML.replace("CALL", _QWEN_XML),
    "glm": _CHATML.replace("CALL", _GLM),
    "minimax": _CHATML.replace("CALL", _MINIMAX),
    "minicpm": _CHATML.replace("CALL", _MINICPM),
    "functionary": "{% if tools %}{{ tools | tojson }}{% endif %}" + _FUNCTIONARY,
    "gemma": _CHATML.replace("CALL", _GEMMA),
    "harmony": _CHATML.replace("CALL", _HARMONY),
}
"""Name of the syntax -> template."""
