"""train makes an EAGLE-3 head for a model of the user's own.  Serves nothing.

    generate    the target answers made-up conversations     shards/*.ids, *.json
    vocabulary  the tokens that the head can draw            vocabulary.json
    optimise    the head unrolled on its own features        state.safetensors, train.jsonl
    evaluate    held-out answers, place by place             evaluation.json
    export      what vLLM, SGLang and we load, and its card  head/
    measure     tau by the engine itself, on its CPU         the card again

Every stage goes on where the last run of it ended.  Recipe: EAGLE-3 (Li et al., 2025) with the
norms of EAGLE-3.1, on answers of the target itself.
"""

from __future__ import annotations

STAGES = ("generate", "vocabulary", "optimise", "evaluate", "export", "measure")
USUAL = STAGES[:-1]
