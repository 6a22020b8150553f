"""cache remembers: which KV blocks exist, who shares them, which to keep.  Chooses no token.

Try it:  slipstream blocks prompt.txt
"""
