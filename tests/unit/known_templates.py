"""Chat templates in the ways of those that well-known models bring along: their constructs, not their texts."""

JOINED = r"""
{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nHelp<|im_end|>\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message.content + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}
"""

HEADERS = r"""
{%- if not date_string is defined %}
{%- if strftime_now is defined %}
{%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{%- endif %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set first = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}
{%- set first = '' %}
{%- endif %}<|start|>{{ date_string ~ '\n' }}
{%- if tools is not none %}
{{ 'tools: ' ~ (tools | length) }}
{%- for t in tools %}
{{ t | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
{{ first }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|' + message['role'] + '|>\n\n' + message['content'] | trim + '<|end|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}
{{- raise_exception('one call') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}
{{- '}' }}
{%- else %}
{{- message.content | tojson }}
{%- endif %}
{%- endfor %}
"""

THINKING = r"""
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi and message.role == 'user' and message.content is string and not(message.content.startswith('<tool>')
    and message.content.endswith('</tool>')) %}
{%- set ns.multi = false %}
{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
{{- '<user>' }}
{%- endif %}
{{- content }}
{%- else %}
{{- '<' + message.role + '>' + content }}
{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>' }}
{%- endif %}
"""

TURNS = r"""
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set prefix = messages[0]['content'] + '\n\n' -%}
{%- set said = messages[1:] -%}
{%- else -%}
{%- set prefix = '' -%}
{%- set said = messages -%}
{%- endif -%}
{%- for message in said -%}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<turn>' + role + '\n' + (prefix if loop.first else '') }}
{{ message['content'] | trim }}
{{ '</turn>\n' }}
{%- endfor -%}
"""

INSTRUCTIONS = r"""
{% set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{ users | length }}
{{ users[-1].content }}
{% set system = messages | rejectattr('role', '==', 'user') | map(attribute='content') | join('; ') %}
{{ system }}
{% for message in messages if message.role != 'system' %}
{% if message.role not in ['user', 'assistant'] %}
{% continue %}
{% endif %}[INST]{{ message.content | replace('[', '(') }}[/INST]{{ loop.length ~ eos_token }}
{% endfor %}
{% set block %}
{{ messages | first | tojson }}
{{ (messages | last).content.upper() }}
{% endset %}
{{ block }}
{% for key, value in messages[0].items() %}
{{ key }}={{ value.replace('a', 'b').title() }},{% endfor %}
{{ messages[0].get('none', 'nothing') | default('x') }}
{{ none | string }}
{{ '7' | int + 1 }}
"""

MACROS = r"""
{%- macro written(content, count=0) %}
{%- if content is string %}{{- content }}{%- set count = count + 1 %}
{%- else %}{%- for item in content %}{{- item.text ~ count }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- macro turn(message) -%}
{{- '<' + message.role + '>' + written(message.content)|trim + written(message.content, count=2) }}
{%- endmacro %}
{%- for message in messages %}
{{- turn(message) }}
{%- for call in message.tool_calls | default([]) %}
{%- for name, value in call.function.arguments | items %}
{%- set shown = value | string if value is string else value | tojson | safe %}
{{- name ~ '=' ~ shown }}{{ shown }}
{%- endfor %}
{%- endfor %}
{%- endfor %}
{{- messages | map(attribute='role') | reject('equalto', 'user') | join(', ') }}
"""

KNOWN = {
    "macros": MACROS,
    "joined": JOINED,
    "headers": HEADERS,
    "thinking": THINKING,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
}
