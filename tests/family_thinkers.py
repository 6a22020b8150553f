"""Chat templates in the style of Qwen, GLM and MiniMax.  Only text; see family_templates.py."""

QWEN_HEAD = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nCall a function so:\n<tool_call>\n{\"name\": <name>, " }}
    {{- "\"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
QWEN_TAIL = r"""
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
HERMES = (
    QWEN_HEAD
    + r"""
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + QWEN_TAIL
)
LAST_ASKED = r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
"""
QWEN3 = (
    QWEN_HEAD
    + LAST_ASKED
    + r"""
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- set content = message.content %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + QWEN_TAIL
)
QWEN3_CODER = (
    QWEN_HEAD.replace('{\\"name\\": <name>, ', "<function=name>\\n<parameter=key>\\n").replace(
        '\\"arguments\\": <object>}', "value\\n</parameter>\\n</function>"
    )
    + r"""
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content is string and message.content | trim | length > 0 %}
            {{- '\n' + message.content | trim + '\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n<function=' + tool_call.function.name + '>\n' }}
            {%- for key, value in tool_call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {%- set value = value | tojson | safe if value is mapping
                    or (value is sequence and value is not string) else value | string %}
                {{- value }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + QWEN_TAIL
)
GLM = (
    LAST_ASKED
    + r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n\n<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '</tools>\n\n<tool_call>{name}@LINE@<arg_key>{key}</arg_key>@LINE@<arg_value>{value}'
        + '</arg_value>@LINE@</tool_call>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>@LINE@' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last and message.reasoning_content %}
            {{- '@LINE@<think>' + message.reasoning_content.strip() + '</think>' }}
        {%- else %}
            {{- '@LINE@@EMPTY@</think>' }}
        {%- endif %}
        {%- if message.content.strip() %}{{- '@LINE@' + message.content.strip() }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '@LINE@<tool_call>' + tool_call.function.name + '@LINE@' }}
            {%- for key, value in tool_call.function.arguments.items() %}
                {{- '<arg_key>' }}{{- key }}{{- '</arg_key>@LINE@<arg_value>' }}
                {{- value | tojson(ensure_ascii=False) if value is not string else value }}
                {{- '</arg_value>@LINE@' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '@LINE@<tool_response>@LINE@' + message.content + '@LINE@</tool_response>' }}
    {%- else %}
        {{- '<|system|>@LINE@' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>@OPEN@' }}{%- endif %}
"""
)
GLM45 = GLM.replace("@LINE@", "\\n").replace("@EMPTY@", "<think>").replace("@OPEN@", "")
GLM47 = GLM.replace("@LINE@", "").replace("@EMPTY@", "").replace("@OPEN@", "<think>")
MINIMAX = (
    LAST_ASKED
    + r"""
{{- ']~!b[]~b]system\nBe helpful.' }}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>\n' }}
    {%- for tool in tools %}{{- '<tool>' + tool.function | tojson + '</tool>\n' }}{%- endfor %}
    {{- '</tools>\n<minimax:tool_call>\n<invoke name="tool">\n<parameter name="key">value' }}
    {{- '</parameter>\n</invoke>\n</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ']~b]ai\n' }}
        {%- if loop.index0 > ns.last and message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- if message.tool_calls %}
            {{- '\n<minimax:tool_call>\n' }}
            {%- for tool_call in message.tool_calls %}
                {%- set tool_call = tool_call.function %}
                {{- '<invoke name="' + tool_call.name + '">\n' }}
                {%- for key, value in tool_call.arguments.items() %}
                    {{- '<parameter name="' + key + '">' }}
                    {{- value | tojson(ensure_ascii=False) if value is not string else value }}
                    {{- '</parameter>\n' }}
                {%- endfor %}
                {{- '</invoke>\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- ']~b]tool' }}
        {%- endif %}
        {{- '\n<response>' + message.content + '</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '[e~[\n' }}{%- endif %}
    {%- else %}
        {{- ']~b]' + message.role + '\n' + message.content + '[e~[\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}
"""
)
