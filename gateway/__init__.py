"""gateway talks: OpenAI's HTTP and SSE on one side, engine messages on the other.  Never torch.

Try it:  slipstream serve smollm2   then   curl localhost:8000/v1/models
"""
