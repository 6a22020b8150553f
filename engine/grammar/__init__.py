"""Constrained output: what a schema may hold, which tokens may come next.  Imports nothing.

schema    check a JSON Schema, refuse or drop what cannot be enforced; the gateway uses it
clean     the tables and the pass behind it: what each keyword means to the grammar
verdict   ask llguidance whether a schema can be enforced, and find the keyword at fault
matcher   Lark text -> Compiled -> State: the one file that runs llguidance's matcher
prose     free text before a trigger: what of it decides the next mask
masks     the mask rows of a whole step in one native call; the only file here with tensors
"""

from __future__ import annotations
