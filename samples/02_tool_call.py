"""Force one tool call and use its arguments: valid JSON that fits the schema."""

from __future__ import annotations

from demo import MODEL, TOOLS, answer, server
from openai import OpenAI


def main() -> None:
    """Ask for a call by name; run the tool."""
    with server() as url:
        client = OpenAI(base_url=url, api_key="none")
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Is it warm in Lisbon today?"}],
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_completion_tokens=64,
            temperature=0,
        )
        for call in reply.choices[0].message.tool_calls or ():
            print(call.function.name, call.function.arguments)
            print(answer(call.function.name, call.function.arguments))


if __name__ == "__main__":
    main()
