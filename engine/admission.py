"""Say why a request can never run here, when it cannot.  Queues nothing, knows no other request."""

from __future__ import annotations

from engine.messages import Hello, Refused, Submit


def refusal(submit: Submit, hello: Hello) -> Refused | None:
    """The answer to a request that this engine could not finish even alone; None when it could."""
    total = len(submit.prompt) + submit.max_tokens
    if not submit.prompt or submit.max_tokens < 1 or submit.n < 1:
        return Refused(submit.id, "invalid_value", "A prompt, max_tokens and n >= 1 are needed.")
    if total > hello.max_len:
        return Refused(
            submit.id, "context_length_exceeded",
            f"The prompt has {len(submit.prompt):,} tokens and max_tokens is "
            f"{submit.max_tokens:,}; this engine holds {hello.max_len:,}. Shorten the prompt, "
            "lower max_tokens, or start the engine with a larger --max-model-len or "
            "--kv-cache-memory-bytes.",
            "messages",
        )  # fmt: skip
    if not 0 <= min(submit.prompt) <= max(submit.prompt) < hello.vocab:
        return Refused(
            submit.id, "invalid_token",
            f"The prompt has a token id outside 0..{hello.vocab - 1}.", "prompt",
        )  # fmt: skip
    return None
