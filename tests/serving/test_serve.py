"""``hasten serve`` in a process of its own: answers, refusals, tokens, overload, reload and the end."""

import json
import os
import signal
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy
import pytest
import torch

from helpers.process import run_hasten

httpx = pytest.importorskip("httpx")
pytest.importorskip("onnxruntime")

from hasten.deploy.trained_model import load_trained_model  # noqa: E402
from helpers.served import running  # noqa: E402

ONES = [0.5] * 64
TOKEN = "correct-horse-battery-staple"


def predict(client, inputs):
    return client.post("/predict", json={"inputs": inputs})


def test_answers_are_those_of_the_trained_model(client, exported):
    inputs = torch.rand(7, 64, generator=torch.Generator().manual_seed(0))
    answer = predict(client, inputs.tolist()).json()
    with torch.inference_mode():
        expected = load_trained_model(exported).model(inputs)
    assert numpy.allclose(answer["scores"], expected.numpy(), atol=1e-4)
    assert answer["indices"] == expected.argmax(1).tolist()
    assert answer["classes"] == [str(index) for index in answer["indices"]]


def png(pixels, mode="L"):
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels, mode).save(file, "PNG")
    return file.getvalue()


def test_image_is_resized_and_scaled_as_the_signature_says(client):
    pixels = numpy.random.default_rng(0).integers(0, 256, (8, 8), dtype=numpy.uint8)
    by_image = client.post("/predict", content=png(pixels), headers={"Content-Type": "image/png"}).json()
    by_numbers = predict(client, [(pixels.reshape(-1) / 255).tolist()]).json()
    assert numpy.allclose(by_image["scores"], by_numbers["scores"], atol=1e-5)
    large = numpy.full((300, 200, 3), 200, dtype=numpy.uint8)
    assert client.post("/predict", content=png(large, "RGB"), headers={"Content-Type": "image/png"}).status_code == 200


def bomb():
    """A PNG of 60,000 x 60,000 pixels in a few hundred bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


JSON, PNG = "application/json", "image/png"
ABUSE = {
    "no JSON": (JSON, b"not json", 400, "no JSON"),
    "truncated": (JSON, b'{"inputs": [[1, 2', 400, "no JSON"),
    "empty body": (JSON, b"", 400, "no JSON"),
    "not UTF-8": (JSON, b'{"inputs": "\xff"}', 400, "no JSON"),
    "too deep": (JSON, b"[" * 100_000, 400, "no JSON"),
    "a list": (JSON, b"[1]", 422, "inputs"),
    "no inputs": (JSON, b'{"x": 1}', 422, "inputs"),
    "half a character": (JSON, b'{"inputs": {"\\ud800": 1}}', 422, "not \\ud800"),
    "a text": (JSON, b'{"inputs": "abc"}', 422, "must be numbers"),
    "null": (JSON, b'{"inputs": null}', 422, "must be [batch, 64]"),
    "texts": (JSON, json.dumps({"inputs": [["a"] * 64]}).encode(), 422, "must be numbers"),
    "ragged": (JSON, b'{"inputs": [[1, 2], [3]]}', 422, "different lengths"),
    "wrong width": (JSON, json.dumps({"inputs": [[0.0] * 63]}).encode(), 422, "must be [batch, 64]"),
    "one dimension": (JSON, json.dumps({"inputs": ONES}).encode(), 422, "must be [batch, 64]"),
    "many dimensions": (JSON, b'{"inputs": ' + b"[" * 30 + b"1" + b"]" * 30 + b"}", 422, "must be [batch, 64]"),
    "no sample": (JSON, b'{"inputs": []}', 422, "must be [batch, 64]"),
    "NaN": (JSON, json.dumps({"inputs": [[float("nan")] * 64]}).encode(), 422, "NaN"),
    "infinity": (JSON, json.dumps({"inputs": [[1e999] * 64]}).encode(), 422, "NaN"),
    "beyond float32": (JSON, json.dumps({"inputs": [[1e300] * 64]}).encode(), 422, "outside of float32"),
    "long text": (JSON, json.dumps({"inputs": [["9" * 100_000] + ["1"] * 5000]}).encode(), 422, "must be"),
    "huge integer": (JSON, b'{"inputs": [[' + b"9" * 5000 + b"]]}", 400, "no JSON"),
    "wrong name": (JSON, b'{"inputs": {"other": [[1]]}}', 422, "the inputs are input"),
    "too many samples": (JSON, json.dumps({"inputs": [[0] * 64] * 1025}).encode(), 413, "1024 samples"),
    "another type": ("application/x-python-pickle", b"\x80\x04N.", 415, "content type"),
    "no image": (PNG, b"GIF89a" + b"\0" * 50, 400, "no image/png"),
    "image bomb": (PNG, bomb(), 413, "too many"),
    "truncated image": (PNG, png(numpy.zeros((8, 8), numpy.uint8))[:40], 400, "no image/png"),
}


@pytest.mark.parametrize("kind", ABUSE)
def test_abusive_input_gets_a_reason(kind, client):
    content_type, body, status, reason = ABUSE[kind]
    answer = client.post("/predict", content=body, headers={"Content-Type": content_type})
    assert answer.status_code == status and reason in answer.json()["error"], answer.text
    assert "Traceback" not in answer.text and "\n" not in answer.json()["error"]


HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_body_that_is_too_large_is_not_read(client):
    def body():
        for _ in range(1000):
            yield b" " * 1_000_000

    began = time.monotonic()
    try:
        answer = client.post("/predict", content=body(), headers={"Content-Type": JSON})
        assert answer.status_code == 413
    except httpx.TransportError:  # the server answered and closed while the client was still sending
        pass
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(HEAD % 10**9)
        assert b" 413 " in connection.recv(100) and time.monotonic() - began < 20.0
    assert predict(client, [ONES]).status_code == 200


def test_slow_client_does_not_delay_others(client):
    host, port = client.base_url.host, client.base_url.port
    slow = [socket.create_connection((host, port)) for _ in range(50)]
    for connection in slow:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    began = time.monotonic()
    assert predict(client, [ONES]).status_code == 200 and time.monotonic() - began < 5.0
    for connection in slow:
        connection.close()


def test_health_ready_metrics_and_description(client):
    assert client.get("/health").json() == {"status": "ok"} and client.get("/ready").status_code == 200
    predict(client, [ONES])
    text = client.get("/metrics").text
    assert 'hasten_answers_total{code="200"}' in text and "hasten_request_seconds_bucket" in text
    described = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert client.post("/predict", json=described[JSON]["example"]).status_code == 200
    assert "/predict" in client.get("/").text and client.get("/nothing").status_code == 404
    assert client.get("/signature").json()["classes"] == list("0123456789")


def test_requests_at_the_same_time_share_batches(client):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: predict(client, [ONES]), range(200)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({json.dumps(answer.json()["indices"]) for answer in answers}) == 1
    metrics = client.get("/metrics").text
    batches = float(
        next(line for line in metrics.splitlines() if line.startswith("hasten_batch_samples_count")).split()[1]
    )
    samples = float(
        next(line for line in metrics.splitlines() if line.startswith("hasten_batch_samples_sum")).split()[1]
    )
    assert samples > 1.2 * batches


def test_token_is_needed_and_health_is_open(exported, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    with running(exported, "--token-file", str(file), "--host", "0.0.0.0", token=TOKEN) as (client, _, _):
        assert predict(client, [ONES]).status_code == 200
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": ""}):
            refused = httpx.post(client.base_url.join("/predict"), json={"inputs": [ONES]}, headers=headers)
            assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
        assert httpx.get(client.base_url.join("/health")).status_code == 200
        assert httpx.get(client.base_url.join("/metrics")).status_code == 401


def test_overload_is_refused_with_the_time_to_wait(exported):
    with running(exported, "--max-queue", "8", "--max-wait", "0.2s", "--max-batch", "64") as (client, _, _):
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: predict(client, [ONES]), range(120)))
        codes = {answer.status_code for answer in answers}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert codes == {200, 429} and all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert predict(client, [ONES]).status_code == 200


def test_newer_model_is_loaded_without_a_lost_request(exported, tmp_path):
    for name in ("model.onnx", "signature.json"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    codes, versions, ended = set(), set(), threading.Event()
    with running(tmp_path) as (client, _, log):

        def ask():
            while not ended.is_set():
                answer = predict(client, [ONES])
                codes.add(answer.status_code)
                versions.add(answer.json().get("model"))

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask) for _ in range(4)]
            (tmp_path / "new").write_bytes((exported / "model.onnx").read_bytes())
            os.replace(tmp_path / "new", tmp_path / "model.onnx")
            deadline = time.monotonic() + 20.0
            while len(versions) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            (tmp_path / "model.onnx").write_bytes(b"damaged")
            while "was not loaded" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            ended.set()
            for one in asked:
                one.result()
        assert codes == {200} and len(versions) == 2 and "the older one still answers" in log.read_text()


def test_accepted_requests_are_answered_before_the_end(exported):
    with running(exported, "--max-wait", "1s", "--max-batch", "64") as (client, process, log):
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(predict, client, [ONES]) for _ in range(8)]
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            assert [answer.result().status_code for answer in answers] == [200] * 8
        assert process.wait(30.0) == 0 and "stopped; answers by status: {'200': 8}" in log.read_text()


def test_second_model_is_compared_on_the_same_requests(exported, tmp_path):
    for name in ("model.onnx", "signature.json"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    with running(exported, "--compare", str(tmp_path)) as (client, _, _):
        for _ in range(20):
            predict(client, [ONES, [0.1] * 64])
        deadline, text = time.monotonic() + 10.0, ""
        while "hasten_shadow_agreed_total 40.0" not in text and time.monotonic() < deadline:
            text = client.get("/metrics").text
        assert "hasten_shadow_agreed_total 40.0" in text and 'hasten_shadow_seconds_count{model="second"} 20.0' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "has no signature.json; make it with"),
        (["served", "--host", "0.0.0.0"], "can be reached by others; give a --token-file"),
        (["served", "--token-file", "open"], "can be read by others; chmod 600"),
        (["served", "--token-file", "short"], "at least 16 ASCII characters"),
        (["served", "--token-file", "missing"], "cannot be read"),
        (["served/weights.pt"], "only ONNX models with a signature"),
        (["served", "--compare", "nothing"], "has no signature.json"),
        (["served", "--tune-batching", "--max-batch", "4"], "leave out these two or --tune-batching"),
        (["served", "--port", "70000"], "--port"),
        (["served", "--max-wait", "20"], "--max-wait must be below --deadline"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.slow
def test_wrong_request_is_one_line(options, message, exported, tmp_path):
    (tmp_path / "served").mkdir()
    for name in ("model.onnx", "signature.json"):
        (tmp_path / "served" / name).write_bytes((exported / name).read_bytes())
    (tmp_path / "served" / "weights.pt").write_bytes(b"\x80\x04N.")
    for name, text, mode in (("open", TOKEN, 0o644), ("short", "abc", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    done = run_hasten("serve", *options, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_port_in_use_is_one_line(client, exported, tmp_path):
    done = run_hasten("serve", str(exported), "--port", str(client.base_url.port), cwd=tmp_path)
    assert done.returncode == 2 and "choose another --port" in done.stderr


def test_second_model_may_be_its_file(exported):
    with running(exported, "--compare", str(exported / "model.onnx")) as (client, _, _):
        assert predict(client, [ONES]).status_code == 200
