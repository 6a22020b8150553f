"""Constrained output: what a schema may hold, which tokens may come next.  Imports nothing.

schema    check a JSON Schema, refuse or drop what cannot be enforced; the gateway uses it
clean     the tables and the pass behind it: what each keyword means to the grammar
formats   what is put beside a `format`, so that it takes only what calendars have
wellformed  a quick pass that spares most schemas the meta-schema
explain   what becomes of a schema, for a person: rows, a random sample, where a text fails
verdict   ask llguidance whether a schema can be enforced, and find the keyword at fault
trial     a costly schema in a process that can be killed; forks: that process; costly: which, when
matcher   Lark text -> Compiled -> State: the one file that runs llguidance's matcher
prose     free text before a trigger: what of it decides the next mask
closing   the promise that an output ends inside its budget, kept token by token
planner   the shortest ending of a constrained output; spelling: of one string or number
probe     a scratch matcher asked byte by byte; hints, lexical: what such a search cannot see
masks     the mask rows of a whole step in one native call; the only file here with tensors
"""

from __future__ import annotations
