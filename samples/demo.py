"""`make demo`: start a server, hold a conversation with tool calls, show it.  Tests nothing.

The client is OpenAI's own SDK; nothing in `converse` knows that the server is Slipstream.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
from openai import OpenAI

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
MODEL = os.environ.get("MODEL", "smollm2")
BOOT_S = 180.0

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
REPORT = {
    "type": "object",
    "properties": {
        "warmer": {"enum": ["Paris", "Oslo"]},
        "degrees": {"type": "integer", "minimum": -60, "maximum": 60},
    },
    "required": ["warmer", "degrees"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "report": REPORT}
ABOUT = {
    "get_weather": "Current weather of a city",
    "report": "Tell the user which city is warmer, and how warm it is there",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name, "description": ABOUT[name], "parameters": schema, "strict": True,
        },
    }
    for name, schema in SCHEMAS.items()
]
QUESTIONS = {
    "What is the weather in Paris?": "get_weather",
    "And in Oslo?": "get_weather",
    "Which of the two is warmer?": "report",
}
KNOWN = {"paris": 21, "oslo": 12}


@contextmanager
def server() -> Iterator[str]:
    """The base URL of BASE_URL's server, or of one of our own that lives as long as this block."""
    if given := os.environ.get("BASE_URL"):
        yield given
        return
    process = subprocess.Popen(
        [sys.executable, "slipstream.py", "serve", MODEL, "--port", "0", "--drain-delay", "0",
         "--no-gateway.access-log"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    try:
        yield _url(process)
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def _url(process: subprocess.Popen[str]) -> str:
    """Show the server's first lines; the URL is in one of them, when the model is loaded."""
    assert process.stdout is not None
    late = threading.Timer(BOOT_S, process.kill)  # which also ends the loop below
    late.start()
    try:
        for line in process.stdout:
            print("  server:", line.rstrip())
            if found := re.match(r"URL\s+(\S+)", line):
                return found[1]
    finally:
        late.cancel()
    raise SystemExit(f"The server did not start: exit code {process.wait(10)}. Run `slipstream "
                     f"serve {MODEL}` to see why.")


def turn(client: OpenAI, messages: list[dict], tool: str) -> tuple[str, list[dict]]:
    """One streamed call of `tool`, shown as it comes; the answer's text and its calls."""
    start = time.monotonic()
    first = 0.0
    text, calls, usage, finish = "", [], None, ""
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, stream=True,
        tool_choice={"type": "function", "function": {"name": tool}},
        parallel_tool_calls=False, temperature=0, seed=7, max_completion_tokens=96,
        stream_options={"include_usage": True},
        extra_headers={"x-session-affinity": f"demo-{os.getpid()}"},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for part in chunk.choices:
            first = first or time.monotonic() - start
            if part.delta.content:
                text += part.delta.content
                print(part.delta.content, end="", flush=True)
            for delta in part.delta.tool_calls or ():
                if delta.id:
                    calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                    print(f"\n  call {delta.function.name} ", end="", flush=True)
                calls[delta.index]["arguments"] += delta.function.arguments or ""
                print(delta.function.arguments or "", end="", flush=True)
            finish = part.finish_reason or finish
    assert usage is not None, "no usage came"
    took = time.monotonic() - start
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"\n  [{finish}: {usage.prompt_tokens} prompt tokens, {cached} of them cached; first "
          f"after {first:.2f} s; {usage.completion_tokens / took:.0f} tokens/s]")
    return text, calls


def answer(name: str, arguments: str) -> str:
    """The tools: check the arguments, as every caller should, then answer."""
    given = json.loads(arguments)
    jsonschema.validate(given, SCHEMAS[name])
    print(f"  arguments are valid JSON and fit the schema: {given}")
    if name == "report":
        return "shown to the user"
    city = given["city"].strip().lower()
    degrees = KNOWN.get(city, 15)
    return json.dumps({"city": given["city"], "temperature": degrees, "unit": "celsius"})


def converse(url: str) -> None:
    """Three turns: two look something up, the third reports in a shape a program can read."""
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    messages: list[dict] = [{"role": "system", "content": "You are a terse weather assistant."}]
    for question, tool in QUESTIONS.items():
        print(f"\nuser: {question}")
        messages.append({"role": "user", "content": question})
        text, calls = turn(client, messages, tool)
        messages.append(said(text, calls))
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"],
                             "content": answer(call["name"], call["arguments"])})


def said(text: str, calls: list[dict]) -> dict:
    """The assistant's message, as the next request repeats it."""
    message: dict = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return message


def main() -> None:
    """Run it."""
    with server() as url:
        converse(url)
    print("\ndemo done")


if __name__ == "__main__":
    main()
