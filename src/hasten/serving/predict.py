"""``POST /predict`` as a plain ASGI application.

Requests, responses and middleware of FastAPI took half of the 110 microseconds of a request, so that the one path that
must be fast goes without them.
"""

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import numpy
import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hasten.deploy.signature import Signature
from hasten.serving.inputs import IMAGE_TYPES, RequestError, parse_image, parse_json
from hasten.serving.models import ServedModel

if TYPE_CHECKING:
    from hasten.serving.app import Service

IMAGES_AT_ONCE = 2  # that are decoded
BODY_TIMEOUT_S = 10.0
CLOSE = {"Connection": "close"}  # where the rest of the body may never come
Headers = dict[bytes, bytes]  # names in lower case


class PredictEndpoint:
    """Answers predictions with the model of a service, which starts after the application was made."""

    service: "Service"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(reversed(scope["headers"]))  # of one that comes twice, the first counts
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read(headers, receive, self.service.max_body)
            began = time.perf_counter()
            inputs = await _parse(headers, body, self.service.holder.signature, self.service.images)
            content = _content(*await self.service.predict(inputs))
        except TimeoutError:
            await send_json(send, {"error": "the body did not arrive in time"}, 408, CLOSE)
        except RequestError as error:
            reason = error.reason.encode(errors="backslashreplace").decode()  # a name may hold half of a character
            await send_json(send, {"error": reason}, error.status, error.headers)
        else:
            await send_json(send, content)
            self.service.latency.observe(time.perf_counter() - began)


async def send_json(
    send: Send, content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Sends a whole answer."""
    body = orjson.dumps(content)
    pairs = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    pairs += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def _read(headers: Headers, receive: Receive, limit: int) -> bytearray:
    """The body; RequestError 413 as soon as it is too long."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise RequestError(413, f"the body has {int(length)} bytes; at most {limit} are read")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise RequestError(413, f"the body has more than {limit} bytes")
        if not message.get("more_body"):
            return body


async def _parse(
    headers: Headers, body: bytes | bytearray, signature: Signature, images: asyncio.Semaphore
) -> tuple[numpy.ndarray, ...]:
    kind = headers.get(b"content-type", b"application/json").decode("latin-1").partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        async with images:
            return await asyncio.to_thread(parse_image, body, kind, signature)
    if kind != "application/json":
        known = ", ".join(["application/json", *(IMAGE_TYPES if signature.image else ())])
        raise RequestError(415, f"the content type is {known}, not {kind[:60]}")
    return parse_json(body, signature)


def _content(scores: numpy.ndarray, model: ServedModel) -> dict[str, Any]:
    """The answer: scores and, for one score a class, the index and name of the largest."""
    if not math.isfinite(scores.sum(dtype=numpy.float64)) and not numpy.isfinite(scores).all():
        raise RequestError(500, "the scores of the model are not finite for this input")
    content: dict[str, Any] = {"scores": scores.tolist(), "model": model.loaded}
    if scores.ndim == 2 and scores.shape[1] > 1:
        indices = scores.argmax(axis=1).tolist()
        content["indices"] = indices
        if model.signature.classes is not None:
            content["classes"] = [model.signature.classes[index] for index in indices]
    return content
