"""The service under load: latency, throughput against other servers, overload, and reloads without a lost request.

All servers serve the same ONNX model in one process on this machine and take turns; the load comes from one process of
keep-alive connections, each with one request at a time, that share the machine's cores with the server. The peers: a
plain FastAPI handler that calls the model, as most people write it, and LitServe and Ray Serve with batching.

Bound: uvicorn, which all but Ray Serve use, with an application that reads the body and answers a constant.

Figures: p99 at 70 % load at most 2x p50, in the median second; at least the throughput of LitServe and Ray Serve, and
3x the plain handler's on small inputs; under overload, for which 3x the capacity is asked of clients that wait for
answers, no error but 429 and memory within 5 %; no request lost over 10,000 with reloads; the first answer at most 3 s
after the start.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httptools
import numpy
import psutil
import uvloop
from _common import finish, installed, interval, parser, print_progress, show
from int8 import trained

from hasten.deploy.export import export_model

CONNECTIONS = 32
SECONDS = 4.0
CALM = 30  # seconds at 70 % load; each gives its own quantiles, so that a stall of the machine spoils one of them
START_S, GROWTH, TAIL, OVER_PLAIN = 3.0, 0.05, 2.0, 3.0

PLAIN = """
import sys
import numpy, onnxruntime, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as hasten does
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name

class Body(BaseModel):
    inputs: list[list[float]]

@app.post("/predict")
def predict(body: Body):
    scores = session.run(None, {name: numpy.asarray(body.inputs, dtype=numpy.float32)})[0]
    return {"scores": scores.tolist(), "indices": scores.argmax(1).tolist()}

@app.get("/ready")
def ready():
    return {}

uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""

LITSERVE = """
import sys
import numpy, onnxruntime, litserve

class Api(litserve.LitAPI):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as hasten does
        self.session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def decode_request(self, request):
        return numpy.asarray(request["inputs"][0], dtype=numpy.float32)

    def batch(self, inputs):
        return numpy.stack(inputs)

    def predict(self, batch):
        return self.session.run(None, {self.name: batch})[0]

    def unbatch(self, scores):
        return list(scores)

    def encode_response(self, scores):
        return {"scores": [scores.tolist()], "indices": [int(scores.argmax())]}

if __name__ == "__main__":
    api = Api(max_batch_size=64, batch_timeout=0.002)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(port=int(sys.argv[2]), generate_client_file=False, log_level="warning", num_api_servers=1)
"""

RAY = """
import os, signal, sys

os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
import numpy, onnxruntime, ray
from ray import serve
from starlette.requests import Request

quiet = {"enable_access_log": False}

@serve.deployment(max_ongoing_requests=1024, logging_config=quiet, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as hasten does
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
    async def compute(self, inputs):
        return list(self.session.run(None, {self.name: numpy.stack(inputs)})[0])

    async def __call__(self, request: Request):
        body = await request.json()
        scores = await self.compute(numpy.asarray(body["inputs"][0], dtype=numpy.float32))
        return {"scores": [scores.tolist()], "indices": [int(scores.argmax())]}

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[2])}, logging_config=quiet)
serve.run(Model.bind(sys.argv[1]), route_prefix="/predict")
signal.sigwait({signal.SIGINT})
ray.shutdown()
"""
CONSTANT = """
import sys
import uvicorn

ANSWER = b'{"scores":[[0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]],"indices":[0]}'

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})

uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""
BOUND = "bound: a constant answer"
PEERS = {
    "plain FastAPI": ("fastapi", PLAIN),
    "LitServe": ("litserve", LITSERVE),
    "Ray Serve": ("ray", RAY),
    BOUND: ("uvicorn", CONSTANT),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def server(command: list[str], port: int) -> Iterator[tuple[subprocess.Popen, float]]:
    """Context manager: a server process and the seconds until its first answer."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    if uvloop.run(one_request(port, body_of(1))) == 200:
                        break
                except OSError:
                    time.sleep(0.02)
                assert process.poll() is None and time.perf_counter() - began < 60.0, "the server did not start"
            yield process, time.perf_counter() - began
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
            for child in children:
                if child.is_running():
                    child.kill()


def body_of(samples: int) -> bytes:
    return json.dumps({"inputs": [[0.5] * 64] * samples}).encode()


def message(body: bytes) -> bytes:
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def one_request(port: int, body: bytes) -> int:
    """The status code of one request."""
    found = await load(port, 1, 10.0, count=1, data=message(body))
    return next(iter(found["codes"]))


class Connection(asyncio.Protocol):
    """A keep-alive connection that sends the same request again and again, each after the answer to the one before.

    A protocol and no stream: the load must cost little beside the server that shares its cores.
    """

    def __init__(self, data: bytes, next_time: Callable[[], float | None], seen: Callable[[int, float], None]):
        self.data, self.next_time, self.seen = data, next_time, seen
        self.parser = httptools.HttpResponseParser(self)
        self.planned, self.is_waiting = 0.0, False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.plan()

    def plan(self) -> None:
        """Sends the next request at its time; closes the connection after the last one."""
        planned, now = self.next_time(), time.perf_counter()
        if planned is None:
            return self.transport.close()
        self.planned = planned or now
        if self.planned > now:
            asyncio.get_running_loop().call_later(self.planned - now, self.send)
        else:
            self.send()

    def send(self) -> None:
        self.planned = min(self.planned, time.perf_counter())  # timers round to milliseconds, also down
        self.is_waiting = True
        self.transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.is_waiting = False
        self.seen(self.parser.get_status_code(), time.perf_counter() - self.planned)
        self.plan()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error or self.is_waiting)


async def load(
    port: int,
    connections: int,
    seconds: float,
    rate: float | None = None,
    count: int | None = None,
    data: bytes | None = None,
) -> dict:
    """Sends requests of one sample over keep-alive connections: as fast as they are answered, or ``rate`` a second.

    With a rate, each request has a planned time and its latency counts from there, so that a server that stalls is not
    spared the requests that would have come in the meantime.
    """
    codes, latencies = Counter(), []
    began, sent = time.perf_counter(), 0

    def times(index: int) -> Iterator[float]:
        """The planned times of a connection; 0.0: at once."""
        nonlocal sent
        for number in itertools.count():
            planned = began + (number * connections + index) / rate if rate is not None else 0.0
            if max(planned, time.perf_counter()) - began >= seconds or (count is not None and sent >= count):
                return
            sent += 1
            yield planned

    def seen(code: int, latency: float) -> None:
        codes[code] += 1
        latencies.append(latency)

    def connection(index: int) -> Connection:
        plan = times(index)
        return Connection(data or message(body_of(1)), lambda: next(plan, None), seen)

    loop = asyncio.get_running_loop()
    gc.disable()  # a collection here would be a stall of the server
    try:
        made = [await loop.create_connection(partial(connection, i), "127.0.0.1", port) for i in range(connections)]
        lost = await asyncio.gather(*(protocol.ended for _, protocol in made))
    finally:
        gc.enable()
    if any(lost):
        raise ConnectionError(f"the server closed {sum(map(bool, lost))} connections before it had answered")
    return {"codes": dict(codes), "latencies": latencies, "rate": codes[200] / (time.perf_counter() - began)}


def memory(process: subprocess.Popen) -> int:
    return psutil.Process(process.pid).memory_info().rss


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where trained runs are kept")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--overload", type=float, default=60.0, metavar="SECONDS")
    options.add_argument("--requests", type=int, default=10_000, help="requests during the reloads")
    options = options.parse_args()
    run = trained("digits", options.runs)
    export_model(run, "digits")
    model = str(run / "model.onnx")
    with tempfile.TemporaryDirectory() as temporary:
        arms = {"hasten serve": lambda port: [sys.executable, "-m", "hasten", "serve", str(run), "--port", str(port)]}
        for name, (package, text) in PEERS.items():
            if why := installed(package):
                print_progress(f"{name}: {why}")
                continue
            script = Path(temporary, f"{name.split()[0]}.py")
            script.write_text(text)
            arms[name] = lambda port, script=script: [sys.executable, str(script), model, str(port)]
        rates, starts = {name: [] for name in arms}, []
        for number in range(options.rounds):
            for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
                print_progress(f"round {number + 1}: {name}")
                port = free_port()
                with server(arms[name](port), port) as (_, start):
                    uvloop.run(load(port, CONNECTIONS, 1.0))
                    rates[name].append(uvloop.run(load(port, CONNECTIONS, SECONDS))["rate"])
                    if name == "hasten serve":
                        starts.append(start)
        capacity = statistics.median(rates["hasten serve"])
        port = free_port()
        with server(arms["hasten serve"](port), port) as (process, _):
            print_progress("70 % load")
            uvloop.run(load(port, CONNECTIONS, 1.0))
            calm = [uvloop.run(load(port, CONNECTIONS, 1.0, rate=0.7 * capacity)) for _ in range(CALM)]
        port = free_port()
        with server([*arms["hasten serve"](port), "--max-queue", "64"], port) as (process, _):
            uvloop.run(load(port, 16 * CONNECTIONS, 5.0))
            before = memory(process)
            print_progress("overload")
            over = uvloop.run(load(port, 16 * CONNECTIONS, options.overload, rate=3 * capacity))
            after = memory(process)
        reloaded = with_reloads(run, Path(temporary), options.requests)
    return report(options, rates, starts, calm, over, (before, after), reloaded)


def with_reloads(run: Path, temporary: Path, requests: int) -> dict:
    """Requests while the model is replaced every 2.5 seconds."""
    served = temporary / "served"
    served.mkdir()
    for name in ("model.onnx", "signature.json"):
        shutil.copyfile(run / name, served / name)
    port, reloads = free_port(), 0

    async def replace(ended: asyncio.Event) -> None:
        nonlocal reloads
        while not ended.is_set():
            shutil.copyfile(run / "model.onnx", served / "new")
            os.replace(served / "new", served / "model.onnx")
            reloads += 1
            await asyncio.sleep(2.5)

    async def both() -> dict:
        ended = asyncio.Event()
        task = asyncio.create_task(replace(ended))
        found = await load(port, 8, 600.0, rate=requests / 20, count=requests)
        ended.set()
        await task
        return found

    with server([sys.executable, "-m", "hasten", "serve", str(served), "--port", str(port)], port):
        print_progress("reloads")
        found = uvloop.run(both())
    return {"codes": found["codes"], "replacements": reloads}


def report(options, rates: dict, starts: list, calm: list[dict], over: dict, memories: tuple, reloaded: dict) -> int:
    """Prints the tables and the verdict."""
    ours = rates["hasten serve"]
    ratios = {
        n: interval(a / b for a, b in zip(ours, other, strict=True)) for n, other in rates.items() if other is not ours
    }
    rows = [
        (name, f"{interval(values):.0f}", f"{ratios[name]:.2f}" if name in ratios else "")
        for name, values in rates.items()
    ]
    show(("server", "requests/s", "hasten serve / it"), rows)
    p50, p99 = ([1e3 * float(numpy.quantile(second["latencies"], share)) for second in calm] for share in (0.5, 0.99))
    tail = interval(late / middle for late, middle in zip(p99, p50, strict=True))
    calm_codes = sum((Counter(second["codes"]) for second in calm), Counter())
    growth = memories[1] / memories[0] - 1
    offered = sum(over["codes"].values()) / options.overload / interval(ours).median  # 3 was asked for; clients wait
    show(
        ("what", "measured", "figure"),
        [
            ("p50 at 70 % load, seconds apart, ms", f"{interval(p50):.2f}", ""),
            ("p99 / p50 of a second", f"{tail:.2f}", f"at most {TAIL}"),
            ("answers at 70 % load", str(dict(calm_codes)), "200 only"),
            (f"answers at {offered:.1f} x capacity", str(over["codes"]), "200 and 429"),
            ("growth of memory under it", f"{growth:+.1%}", f"{GROWTH:.0%}"),
            ("answers with reloads", f"{reloaded['codes']}, {reloaded['replacements']} replacements", "200 only"),
            ("start to first answer, s", f"{interval(starts):.2f}", f"{START_S}"),
        ],
    )
    reached = (
        tail.median <= TAIL
        and set(calm_codes) == {200}
        and set(over["codes"]) == {200, 429}
        and abs(growth) <= GROWTH
        and set(reloaded["codes"]) == {200}
        and sum(reloaded["codes"].values()) >= options.requests
        and interval(starts).median <= START_S
        and ratios["plain FastAPI"].median >= OVER_PLAIN
        and all(ratio.median >= 1.0 for name, ratio in ratios.items() if name != BOUND)
    )
    figure = (
        f"p99 at most {TAIL}x p50 at 70 % load in the median second, {OVER_PLAIN}x the plain handler, at least "
        "LitServe and Ray Serve, no error under overload, no request lost by reloads, 3 s to the first answer"
    )
    numbers = {
        "rates": rates,
        "starts": starts,
        "p50_ms": p50,
        "p99_ms": p99,
        "overload": over["codes"],
        "memory": memories,
        "reloads": reloaded,
    }
    return finish(options, figure, reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
