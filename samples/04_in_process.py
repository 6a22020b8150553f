"""The model in your own process: no server, no port, the same checks and cache."""

from __future__ import annotations

import os

from slipstream import Slipstream

COUNTRY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "islands": {"type": "boolean"}},
    "required": ["name", "islands"],
    "additionalProperties": False,
}


def main() -> None:
    """Stream events, then ask for an answer that fits a schema."""
    with Slipstream(os.environ.get("MODEL", "smollm2")) as llm:
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        for event in llm.chat(question, max_tokens=24, temperature=0):
            print(event)
        answer = llm.complete(
            [{"role": "user", "content": "Describe Japan."}],
            max_tokens=48,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "country", "schema": COUNTRY, "strict": True},
            },
        )
        print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
