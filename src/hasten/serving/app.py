"""The HTTP interface: ``/predict``, ``/health``, ``/ready``, ``/metrics``, a page to try it, and its OpenAPI text.

The event loop reads and checks requests, large ones in threads; the batcher's thread computes. A body is read no
further than its limit.
"""

import asyncio
import hmac
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy
import orjson
import swagger_ui_bundle
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hasten.core.errors import RunError
from hasten.deploy.signature import Signature
from hasten.serving.batcher import Batcher, BatcherSettings, DeadlineExceededError, QueueFullError
from hasten.serving.inputs import IMAGE_TYPES, SEND_LESS, RequestError, parse_image, parse_json, zero_inputs
from hasten.serving.models import ModelHolder, ServedModel
from hasten.serving.shadow import Shadow

LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MIN_BODY_LIMIT = 4_000_000  # bytes of a body that are read for any model
BYTES_PER_ELEMENT = 32  # of a number in JSON, at most
INLINE_BODY = 500_000  # bytes of JSON that the event loop parses itself, in about 3 ms
PARSED_AT_ONCE = 2  # images and larger bodies
EXAMPLE_VALUES = 4096  # of a sample, above which an example would make the pages large
BODY_TIMEOUT_S = 10.0
CLOSE = {"Connection": "close"}  # where the rest of the body may never come
CLIENT_IS_GONE = 499  # as nginx counts it
Headers = dict[bytes, bytes]  # names in lower case
# the files of Swagger UI come from a package, so that the page works without the internet
SWAGGER_PAGE = """<!doctype html><title>REST interface</title><link rel="stylesheet" href="/swagger/swagger-ui.css">
<div id="swagger-ui"></div><script src="/swagger/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#swagger-ui"})</script>"""
OPEN_PATHS = ("/health", "/ready", "/", "/docs", "/openapi.json")  # that need no token

logger = logging.getLogger("hasten.serving")


class Service:
    """The batcher of one application, with its metrics for Prometheus and, if ``compared`` holds two, the shadow model.

    Created in the event loop; starts the inference thread. ``max_body``: largest body of a request, in bytes.
    """

    def __init__(self, holder: ModelHolder, settings: BatcherSettings, max_body: int, compared: Sequence[ServedModel]):
        self.holder, self.max_body = holder, max_body
        self.is_ready = False
        self.registry = CollectorRegistry()
        metric = partial(Histogram, registry=self.registry)
        self.latency = metric("hasten_request_seconds", "Seconds from the whole body to the answer", buckets=LATENCIES)
        self.batch_seconds = metric("hasten_batch_seconds", "Seconds of a batch in the model", buckets=LATENCIES)
        self.batch_samples = metric("hasten_batch_samples", "Samples of a batch", buckets=BATCHES)
        self.answers = Counter("hasten_answers", "Answers by status code", ["code"], registry=self.registry)
        figures: list[tuple[str, str, Callable[[], float]]] = [
            ("hasten_waiting_samples", "Samples in the queue", lambda: self.batcher.samples),
            ("hasten_reload_failures", "Newer models that could not be loaded", lambda: holder.failures),
            ("hasten_reloads", "Models loaded since the start", lambda: holder.reloads),
        ]
        for name, text, value in figures:
            Gauge(name, text, registry=self.registry).set_function(value)
        self.computed_by = holder.model  # the last batch; of the inference thread
        self.parsing = asyncio.Semaphore(PARSED_AT_ONCE)
        self.shadow = Shadow(compared[0].run, compared[1].run, self.registry) if compared else None
        self.loop = asyncio.get_running_loop()
        self.batcher = Batcher(self._compute, self._done, settings, self._observe)

    def _compute(self, inputs: tuple[numpy.ndarray, ...]) -> numpy.ndarray:
        self.computed_by = self.holder.model
        scores = self.computed_by.run(inputs)
        if self.shadow is not None:
            self.shadow.offer(inputs, scores)
        return scores

    def _observe(self, samples: int, seconds: float) -> None:
        self.batch_seconds.observe(seconds)
        self.batch_samples.observe(samples)

    def _done(self, answers: list[tuple[Any, Any]]) -> None:
        """Hands the answers of a batch to the event loop, in one call for all, with the model that computed them."""
        self.loop.call_soon_threadsafe(_resolve, answers, self.computed_by)

    async def predict(self, inputs: tuple[numpy.ndarray, ...]) -> tuple[numpy.ndarray, ServedModel]:
        """The scores of a request and the model that computed them.

        RequestError 429 if too many samples wait, 503 after the deadline, 422 if the model cannot compute the inputs.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        try:
            self.batcher.submit(future, inputs)
            return await future
        except QueueFullError as error:
            seconds = max(1, math.ceil(error.seconds))
            text = f"too many requests wait; try again in {seconds} s"
            raise RequestError(429, text, {"Retry-After": str(seconds)}) from None
        except DeadlineExceededError:
            raise RequestError(503, "the request waited too long; try again later") from None
        except RunError as error:
            raise RequestError(422, str(error)) from None


def _resolve(answers: list[tuple[Any, Any]], model: ServedModel) -> None:
    for future, answer in answers:
        if future.done():  # the client is gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result((answer, model))


class PredictEndpoint:
    """``POST /predict`` as a plain ASGI application; ``service`` must be set before the first request.

    Requests, responses and middleware of FastAPI took half of the 110 microseconds of a request, so that the one path
    that must be fast goes without them.
    """

    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(reversed(scope["headers"]))  # of one that comes twice, the first counts
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read(headers, receive, self.service.max_body)
            began = time.perf_counter()
            inputs = await _parse(headers, body, self.service.holder.signature, self.service.parsing)
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
    """Sends ``content`` as a complete JSON response."""
    body = orjson.dumps(content)
    pairs = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    pairs += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def _read(headers: Headers, receive: Receive, limit: int) -> bytearray:
    """Reads the body of a request; RequestError 413 as soon as it exceeds ``limit`` bytes, ClientDisconnect."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise RequestError(413, f"the body has {int(length)} bytes; at most {limit} are read; {SEND_LESS}")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise RequestError(413, f"the body has more than {limit} bytes; {SEND_LESS}")
        if not message.get("more_body"):
            return body


async def _parse(
    headers: Headers, body: bytes | bytearray, signature: Signature, parsing: asyncio.Semaphore
) -> tuple[numpy.ndarray, ...]:
    kind = headers.get(b"content-type", b"application/json").decode("latin-1").partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        async with parsing:
            return await asyncio.to_thread(parse_image, body, kind, signature)
    if kind != "application/json":
        known = ", ".join(["application/json", *(IMAGE_TYPES if signature.image else ())])
        raise RequestError(415, f"the content type is {known}, not {kind[:60]}")
    if len(body) <= INLINE_BODY:
        return parse_json(body, signature)
    async with parsing:  # the event loop answers others between the parser's steps, each of which holds the GIL
        return await asyncio.to_thread(parse_json, body, signature)


def _content(scores: numpy.ndarray, model: ServedModel) -> dict[str, Any]:
    """The JSON answer: ``scores``, ``model`` (when it was loaded) and, for several scores a sample, ``indices`` and, if
    the signature has them, ``classes`` of the largest ones. RequestError 500 if a score is not finite.
    """
    if not math.isfinite(scores.sum(dtype=numpy.float64)) and not numpy.isfinite(scores).all():
        raise RequestError(500, "the scores of the model are not finite for this input")
    content: dict[str, Any] = {"scores": scores.tolist(), "model": model.loaded}
    if scores.ndim == 2 and scores.shape[1] > 1:
        indices = scores.argmax(axis=1).tolist()
        content["indices"] = indices
        if model.signature.classes is not None:
            content["classes"] = [model.signature.classes[index] for index in indices]
    return content


class Guard:
    """The outermost ASGI application: answers 401 without the token, counts answers by status code, and logs an
    unexpected error and answers it with 500.

    Predictions go to their application at once, past the middleware and routes of FastAPI.
    """

    def __init__(self, app: FastAPI, predict: ASGIApp, token: str | None):
        self.app, self.predict, self.token = app, predict, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        code = 0

        async def count_and_send(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            await send(message)

        try:
            if self.token is not None and not _is_allowed(scope, self.token):
                headers = {"WWW-Authenticate": "Bearer"}
                answer: ASGIApp = JSONResponse({"error": "a bearer token is needed"}, 401, headers)
            else:
                is_prediction = scope["path"] == "/predict" and scope["method"] == "POST"
                answer = self.predict if is_prediction else self.app
            await answer(scope, receive, count_and_send)
        except ClientDisconnect:
            code = CLIENT_IS_GONE
        except Exception:
            logger.exception("a request failed")
            if code:  # too late for another answer
                raise
            await JSONResponse({"error": "internal error"}, 500)(scope, receive, count_and_send)
        self.app.state.service.answers.labels(str(code)).inc()


def make_app(
    holder: ModelHolder,
    settings: BatcherSettings,
    max_body: int,
    token: str | None,
    page: str,
    compared: Sequence[ServedModel] = (),
) -> Guard:
    """The application that serves a model.

    Args:
        holder: The model.
        settings: Limits of batches, queue and deadline.
        max_body: Largest body of a request, in bytes.
        token: Bearer token that requests must carry, except for ``OPEN_PATHS``; None: no token.
        page: The HTML page at ``/``, to try the model by hand.
        compared: Empty, or the model once more and a second one, which gets the same requests and answers none.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = predict.service = Service(holder, settings, max_body, compared)
        holder.start()
        service.is_ready = True
        yield
        service.is_ready = False
        await asyncio.to_thread(service.batcher.close)
        holder.close()
        if service.shadow is not None:
            service.shadow.close()

    title = f"hasten: {holder.signature.task}"
    app = FastAPI(title=title, version="1", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    predict = PredictEndpoint()
    app.router.routes.append(Route("/predict", predict, methods=["POST"]))  # 405 for others

    @app.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Whether requests are accepted")
    async def ready() -> Response:
        is_ready = app.state.service.is_ready
        return JSONResponse({"status": "ready" if is_ready else "stopping"}, 200 if is_ready else 503)

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(app.state.service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/signature", summary="What the model takes and returns")
    async def signature() -> dict[str, Any]:
        return holder.signature.model_dump()

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return SWAGGER_PAGE

    app.mount("/swagger", StaticFiles(directory=swagger_ui_bundle.swagger_ui_path))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> str:
        return page

    app.openapi = partial(_describe, app, holder.signature)
    return Guard(app, predict, token)


def _is_allowed(scope: Scope, token: str) -> bool:
    """Whether a request carries the token, or asks for a page that needs none."""
    if scope["path"] in OPEN_PATHS or scope["path"].startswith("/swagger/"):
        return True
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, word = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(word.strip(), token.encode())


def body_limit(signature: Signature) -> int:
    """Largest body of a request in bytes: that of one sample as JSON, but at least MIN_BODY_LIMIT."""
    return max(MIN_BODY_LIMIT, BYTES_PER_ELEMENT * (signature.max_elements or 0))


def example_inputs(signature: Signature) -> Any:
    """One sample of zeros as lists, the value of "inputs" for ``/predict``: a dict by name if the model has several;
    None if a sample has more than EXAMPLE_VALUES values.
    """
    arrays = zero_inputs(signature)
    if sum(array.size for array in arrays) > EXAMPLE_VALUES:
        return None
    values = {spec.name: array.tolist() for spec, array in zip(signature.inputs, arrays, strict=True)}
    return values if len(values) > 1 else next(iter(values.values()))


def _describe(app: FastAPI, signature: Signature) -> dict[str, Any]:
    """The OpenAPI description as JSON data; that of /predict follows from the signature, with an example that works if
    it is short.
    """
    if app.openapi_schema is None:
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object", "required": ["inputs"]}}}
        if (example := example_inputs(signature)) is not None:
            content["application/json"]["example"] = {"inputs": example}
        if signature.image is not None:
            content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES}
        answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
        operation = {
            "summary": "Scores of the inputs",
            "operationId": "predict_predict_post",
            "requestBody": {"required": True, "content": content},
            "responses": {"200": answer},
        }
        schema = FastAPI.openapi(app)
        schema["paths"] = {"/predict": {"post": operation}, **schema["paths"]}
    return FastAPI.openapi(app)
