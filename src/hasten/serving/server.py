"""``hasten serve``: checks the request, loads the model and runs the server until a signal ends it."""

import gc
import importlib
import ipaddress
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hasten.core.errors import ConfigurationError
from hasten.deploy.onnx_model import MODEL, require
from hasten.serving.app import body_limit, example_inputs, make_app
from hasten.serving.batcher import BatcherSettings, best_batching, measure_batches
from hasten.serving.models import ModelHolder, ServedModel
from hasten.utils.signals import handle_signals

MIN_TOKEN = 16  # characters
TOKEN_VARIABLE = "HASTEN_TOKEN"
MAX_CONNECTIONS = 1000  # at once; more get 503
WEIGHTS, ENVIRONMENT = "model.safetensors", "environment.json"  # files of a run
SWITCH_INTERVAL_S = 0.0005  # after which the event loop gives the interpreter to the inference thread; Python: 0.005
GRACE_S = 30  # for the requests that are being answered when the server is stopped


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | Path | None = None,
    compare: str | Path | None = None,
    tune_batching: bool = False,
    settings: BatcherSettings | None = None,
    threads: int = 0,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Serves a model until SIGINT or SIGTERM; the requests that were accepted are answered before it returns.

    Args:
        model: A directory with ``model.onnx`` and ``signature.json``, as ``hasten export --onnx`` and
            ``hasten quantize`` write it. The run directory of a workload is exported first.
        host: Address to listen at; another than loopback needs a token.
        port: Port; 0 for a free one.
        token_file: File with the bearer token that requests must carry; readable by its owner only. None: the
            environment variable HASTEN_TOKEN, if it is set.
        compare: A second model, as ``model``, that gets the same requests and answers none.
        tune_batching: Whether to measure the batch size and the wait at the start, in place of those of ``settings``.
        settings: Limits of batches, queue and deadline.
        threads: Threads of one operation of the model; 0: all cores.
        report: Called with lines for people.

    Returns:
        ``address`` (URL), ``answers`` (status code -> number), ``reloads`` (number) and ``settings`` (the fields of
        ``BatcherSettings`` that were used).

    Raises:
        ConfigurationError: No such model, one to compare that has other inputs, an open address without a token, a
            token that is too short or whose file others can read, a wait that is not below the deadline, or an address
            or port that cannot be used.
    """
    uvicorn = require("uvicorn")
    token = _read_token(Path(token_file)) if token_file is not None else _check_token(os.environ.get(TOKEN_VARIABLE))
    if token is None and not _is_loopback(host):
        raise ConfigurationError(f"--host {host} can be reached by others; give a --token-file, or serve at 127.0.0.1")
    first = ServedModel(model_directory(Path(model), report), threads)
    holder = ModelHolder(first, report)
    second = ServedModel(model_directory(Path(compare), report), 1) if compare is not None else None
    if second is not None and second.signature.inputs != first.signature.inputs:
        problem = f"{compare} takes other inputs than {model}, so they cannot be compared"
        raise ConfigurationError(f"{problem}; leave --compare out, or export both from the same task")
    settings = settings or BatcherSettings()
    if first.signature.max_batch is not None:  # whatever was asked for
        settings = replace(settings, max_batch=min(settings.max_batch, first.signature.max_batch))
    elif tune_batching:
        size, wait = best_batching(measure_batches(first.run, first.signature))
        settings = replace(settings, max_batch=size, max_wait=wait)
        report(f"batches of at most {size} samples, which wait at most {1000 * wait:.1f} ms")
    if settings.max_wait >= settings.deadline:
        problem = f"requests that wait {settings.max_wait:g} s for others are refused after {settings.deadline:g} s"
        raise ConfigurationError(f"{problem}; --max-wait must be below --deadline, and 20 ms are --max-wait 0.02s")
    sockets = [_listen(host, port)]
    url_host = f"[{host}]" if ":" in host else host
    address = f"http://{url_host}:{sockets[0].getsockname()[1]}"
    compared = (ServedModel(first.directory, 1), second) if second is not None else ()
    app = make_app(holder, settings, body_limit(first.signature), token, make_page(holder, token is not None), compared)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)

    def stop(number: int, frame: Any) -> None:
        server.should_exit = True

    # uvicorn's own raises the signal again at the end, and drops what was accepted at a second signal
    server.capture_signals = lambda: handle_signals((signal.SIGINT, signal.SIGTERM), stop)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what was imported is not searched for garbage again: that stops all requests for tens of milliseconds
    report(f"serving {first.signature.task} at {address}; Ctrl-C stops it")
    try:
        server.run(sockets)
    finally:
        gc.unfreeze()
    service = app.app.state.service
    samples = [sample for family in service.answers.collect() for sample in family.samples]
    answers = {one.labels["code"]: int(one.value) for one in samples if one.name.endswith("_total")}
    return {"address": address, "answers": answers, "reloads": holder.reloads, "settings": vars(settings)}


def make_page(holder: ModelHolder, needs_token: bool) -> str:
    """The HTML page on which a person tries the model."""
    loader = PackageLoader("hasten.serving", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    signature = holder.signature
    inputs = example_inputs(signature)
    return environment.get_template("page.html.j2").render(
        signature=signature.model_dump(),
        needs_token=needs_token,
        example=None if inputs is None else {"inputs": inputs},
    )


def model_directory(path: Path, report: Callable[[str], None]) -> Path:
    """The directory of the model, from it or its ``model.onnx``; exports a run that has newer weights or no export yet;
    ConfigurationError if the path is another file, or the export fails.
    """
    if path.is_file():
        if path.name != MODEL:
            problem = f"{path} is no {MODEL}; only ONNX models with a signature are served"
            raise ConfigurationError(f"{problem}: hasten export RUN --onnx writes them")
        return path.parent
    weights, exported = path / WEIGHTS, path / MODEL
    is_run = weights.exists() and (path / ENVIRONMENT).exists()  # not the files of an export
    if is_run and (not exported.exists() or exported.stat().st_mtime < weights.stat().st_mtime):
        report(f"exporting {path}")
        try:
            importlib.import_module("hasten.deploy.export").export_model(path)  # only now, since it imports torch
        except ConfigurationError as error:
            if exported.exists():  # a directory that was copied has the times of the copy
                why = str(error).partition(";")[0]
                report(f"{exported} is served though {weights} is newer, since {why}; export it after a new training")
                return path
            advice = f"export it first: hasten export {path} --onnx --task TASK"
            raise ConfigurationError(f"{str(error).partition(';')[0]}; {advice}") from None
    return path


def _read_token(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the token file {path} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"the token file {path} can be read by others; chmod 600 {path}")
    return _check_token(token)


def _check_token(token: str | None) -> str | None:
    if token is not None and (len(token) < MIN_TOKEN or not re.fullmatch(r"[!-~]+", token)):
        raise ConfigurationError(f"the token must be one word of at least {MIN_TOKEN} ASCII characters")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError(f"there is no address {host}: {error.strerror}; choose another --host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    listener.listen(1024)
    return listener
