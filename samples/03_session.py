"""Three turns of one session: its cache stays warm, so each turn computes only what is new."""

from __future__ import annotations

from demo import MODEL, server
from openai import OpenAI

QUESTIONS = ("What is a river?", "And a lake?", "Which one flows?")


def main() -> None:
    """Ask three times in a row; show how much of each prompt came from the cache."""
    with server() as url:
        client = OpenAI(base_url=url, api_key="none",
                        default_headers={"x-session-affinity": "sample-3"})
        messages: list[dict] = [{"role": "system", "content": "Answer in one short sentence. " * 8}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, max_completion_tokens=32, temperature=0
            )
            usage = answer.usage
            text = answer.choices[0].message.content
            print(f"{question} -> {text}")
            print(f"  {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt "
                  "tokens came from the cache")
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
