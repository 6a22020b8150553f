"""Stream one answer with OpenAI's SDK.  Uses BASE_URL's server, or starts its own."""

from __future__ import annotations

from demo import MODEL, server
from openai import OpenAI


def main() -> None:
    """Ask, and show the text as it comes."""
    with server() as url:
        client = OpenAI(base_url=url, api_key="none")
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name three colours."}],
            max_completion_tokens=40,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
