"""Chat templates in the style of Llama, Mistral, DeepSeek, Kimi and gpt-oss.  Only text.

They are written for the tests, by what the layouts' own files say, and keep what matters to the
next prompt: where white space goes, what is trimmed, what is dropped, what is refused.
"""

LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set said = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + said + '<|eot_id|>' }}
{%- if tools %}
    {%- set asked = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Respond as {"name": function name, ' }}
    {{- '"parameters": dictionary of argument name and its value}.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- asked + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model makes one call at a time.') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
PYTHONIC = r"""
{{- bos_token }}
{%- if tools %}
    {{- '<|header_start|>system<|header_end|>\n\n' }}
    {{- 'Write [func_name1(params_name1=params_value1), func_name2(params)].\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n' }}{%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|header_start|>ipython<|header_end|>\n\n' + message.content | tojson + '<|eot|>' }}
    {%- else %}
        {{- '<|header_start|>' + message.role + '<|header_end|>\n\n' + message.content | trim }}
        {%- if message.tool_calls %}
            {{- '[' }}
            {%- for tool_call in message.tool_calls %}
                {%- if not loop.first %}{{- ', ' }}{%- endif %}
                {{- tool_call.function.name + '(' }}
                {%- for key in tool_call.function.arguments %}
                    {%- if not loop.first %}{{- ', ' }}{%- endif %}
                    {%- set value = tool_call.function.arguments[key] %}
                    {{- key + '=' }}{{- value | tojson if value is string else value }}
                {%- endfor %}
                {{- ')' }}
            {%- endfor %}
            {{- ']' }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header_start|>assistant<|header_end|>\n\n' }}
{%- endif %}
"""
MISTRAL = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.first and tools %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- message.content + '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id | length != 9 %}
                {{- raise_exception('Ids of tool calls have 9 letters and digits.') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL11 = r"""
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content | trim }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + tool_call.function.name + '[CALL_ID]' + tool_call.id }}
            {{- '[ARGS]' + tool_call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL13 = MISTRAL11.replace(" + '[CALL_ID]' + tool_call.id", "")
DEEPSEEK = r"""
{%- set ns = namespace(is_tool=false, is_first=true) %}
{{- bos_token }}
{%- for message in messages %}{%- if message.role == 'system' %}
    {{- message.content }}
{%- endif %}{%- endfor %}
{%- if tools %}{{- '\n## Tools\n' + tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- if not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
        {%- set ns.is_tool = false %}
        {{- message.content }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']
                + '\n' + '```json' + '\n' + tool['function']['arguments'] + '\n' + '```'
                + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- if not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
        {%- set ns.is_tool = false %}
        {{- message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
DEEPSEEK31 = (
    DEEPSEEK.replace(
        "{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}",
        "{%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}",
    )
    .replace("tool['type'] + '<｜tool▁sep｜>' + ", "")
    .replace(
        "+ '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```'",
        "+ '<｜tool▁sep｜>' + tool['function']['arguments']",
    )
    .replace("<｜Assistant｜>", "<｜Assistant｜></think>")
)
KIMI = r"""
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_system|>' + message.name + '<|im_middle|>## Return of ' + message.tool_call_id }}
        {{- '\n' + message.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content }}
        {%- if message.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for tool_call in message.tool_calls %}
                {%- set given = tool_call['function']['arguments'] %}
                {{- '<|tool_call_begin|>' + tool_call['id'] + '<|tool_call_argument_begin|>' }}
                {{- given if given is string else given | tojson }}
                {{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
HARMONY = r"""
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
    {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: any) => any;\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set later = namespace(final=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and 'tool_calls' not in other %}
                {%- set later.final = true %}
            {%- endif %}
        {%- endfor %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Pass content or thinking beside tool calls, not both.') }}
        {%- elif message.content and not later.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- elif message.thinking and not later.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}
            {{- '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + tool_call.name }}
        {{- '<|channel|>commentary json<|message|>' + tool_call.arguments | tojson + '<|call|>' }}
        {%- set last_call.name = tool_call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
