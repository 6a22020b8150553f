"""Every error a caller can see, and its wire form.  Decides nothing and logs nothing.

    ApiError                      type                   code                     retry
    +- BadRequest             400 invalid_request_error  (the raiser's)           never
    |  `- ContextLengthExceeded   invalid_request_error  context_length_exceeded  never
    +- InvalidApiKey          401 invalid_request_error  invalid_api_key          never
    +- ModelNotFound          404 invalid_request_error  model_not_found          never
    +- UnknownUrl             404 invalid_request_error  unknown_url              never
    +- MethodNotAllowed       405 invalid_request_error  method_not_allowed       never
    +- RequestTimeout         408 timeout_error          request_timeout          client
    +- PayloadTooLarge        413 invalid_request_error  payload_too_large        never
    +- UnsupportedMediaType   415 invalid_request_error  unsupported_media_type   never
    +- QueueFull              429 overloaded_error       queue_full               client
    +- HeadersTooLarge        431 invalid_request_error  headers_too_large        never
    +- Internal               500 server_error           internal                 client
    +- Unavailable            503 server_error           engine_unavailable       client
    |  +- Loading             503 server_error           loading                  client
    |  +- Draining            503 server_error           server_draining          client
    |  `- EngineRestarted     503 server_error           engine_restarted         client
    `- DeadlineExceeded       504 timeout_error          deadline_exceeded        never

"never" sends `x-should-retry: false`, which OpenAI's SDKs obey above all; "client": they decide.
A message says what is wrong, the limit, and the next step: never a prompt, never exception text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from engine.messages import Refused

_encoder = msgspec.json.Encoder()


class ApiError(Exception):
    """An error with a status: answered as JSON before the 200, one `data:` frame after it."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry = True  # False: the same request will fail again, so clients are told not to repeat it

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param or None
        self.code = code or type(self).code
        self.headers: dict[str, str] = {} if self.retry else {"x-should-retry": "false"}
        self.headers.update(headers or {})

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON; all four keys are always there."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return _encoder.encode({"error": error})


class BadRequest(ApiError):
    """The request cannot be served as written; `param` is the path of the field at fault."""

    status = 400
    type = "invalid_request_error"
    retry = False


class ContextLengthExceeded(BadRequest):
    """Prompt and wanted output together are longer than the engine's context."""

    code = "context_length_exceeded"

    def __init__(
        self, prompt_tokens: int, max_tokens: int, limit: int, param: str = "messages"
    ) -> None:
        super().__init__(
            f"The prompt has {prompt_tokens:,} tokens and {max_tokens:,} more may be generated; "
            f"this engine holds {limit:,} together. Shorten the prompt, lower max_tokens, or start "
            f"the server with a larger --max-model-len.",
            param=param,
        )


class InvalidApiKey(ApiError):
    """No key, or one that this server does not know."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    retry = False

    def __init__(self) -> None:
        super().__init__(
            "This server needs a valid API key. Send it as `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`.",
            headers={"www-authenticate": "Bearer"},
        )


class ModelNotFound(ApiError):
    """The named model is not the one this server serves."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    retry = False

    def __init__(self, served: str) -> None:
        super().__init__(
            f"That model is not served here; this server serves `{served}`. See GET /v1/models.",
            param="model",
        )


class UnknownUrl(ApiError):
    """No route has this path."""

    status = 404
    type = "invalid_request_error"
    code = "unknown_url"
    retry = False

    def __init__(self) -> None:
        super().__init__("Unknown request URL. The endpoints begin with /v1/, as in /v1/models.")


class MethodNotAllowed(ApiError):
    """The path exists, the method does not; `allow` lists the ones that do."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    retry = False

    def __init__(self, allow: str) -> None:
        super().__init__(
            f"This URL does not take that method; it takes {allow}.", headers={"allow": allow}
        )


class RequestTimeout(ApiError):
    """The request's bytes came too slowly; the connection is closed."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class PayloadTooLarge(ApiError):
    """The body is larger than the limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"
    retry = False

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit:,} bytes, the limit of this server. "
            f"Send less, or start it with a larger --gateway.max-body-bytes.",
            headers={"connection": "close"},
        )


class UnsupportedMediaType(ApiError):
    """The body is not JSON, or is compressed."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"
    retry = False


class HeadersTooLarge(ApiError):
    """Too many header bytes or lines."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"
    retry = False


class QueueFull(ApiError):
    """The queue is at its bound; decided before the 200."""

    status = 429
    type = "overloaded_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_s))


class Internal(ApiError):
    """A fault of ours; the log has the rest under the request id."""

    def __init__(self, code: str = "internal", message: str | None = None) -> None:
        super().__init__(
            message
            or "The server failed on this request. Try again, or report its x-request-id.",
            code=code,
        )


class Unavailable(ApiError):
    """The engine cannot take work now."""

    status = 503
    code = "engine_unavailable"
    text = "The engine is not available now. Try again soon; GET /ready tells when it is back."
    wait_s = 2.0

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.text, headers=retry_after(self.wait_s))


class Loading(Unavailable):
    """The engine is still loading its model."""

    code = "loading"
    text = "The model is still loading. Try again soon; GET /ready tells when it is done."


class Draining(Unavailable):
    """The server is shutting down; also the typed end of streams that outlive the drain."""

    code = "server_draining"
    text = "The server is shutting down. Send the request again a little later."
    wait_s = 5.0

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message)
        self.headers["connection"] = "close"


class EngineRestarted(Unavailable):
    """The engine died while it worked on this request."""

    code = "engine_restarted"
    text = "The engine restarted while it worked on this request. Send the request again."


class DeadlineExceeded(ApiError):
    """The caller's own deadline has passed or cannot be met."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    retry = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message or "The deadline of x-request-deadline-ms passed. Allow more time.",
        )


_TYPES = {429: "overloaded_error", 504: "timeout_error"}


def refused(reason: Refused) -> ApiError:
    """The error for a request that the engine would not take, with the engine's status and code."""
    error: ApiError
    if reason.status == 429:
        return QueueFull(reason.message, 1.0)
    if reason.status == 503:
        return Unavailable(reason.message)
    if 400 <= reason.status < 500:
        error = BadRequest(reason.message, param=reason.param, code=reason.code)
    else:
        error = ApiError(reason.message, param=reason.param, code=reason.code)
    error.status = reason.status
    error.type = _TYPES.get(reason.status, error.type)
    return error


def retry_after(seconds: float) -> dict[str, str]:
    """Both headers that clients read: whole seconds (at least 1), and milliseconds."""
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }
