"""Asks a served model, and waits while it is busy: ``hasten serve runs/digits/int8``, ``python examples/client.py``."""

import json
import time
import urllib.error
import urllib.request


def predict(inputs: list, address: str = "http://127.0.0.1:8000", attempts: int = 5) -> dict:
    """The answer to a list of samples; a busy server is asked again after the seconds that it names."""
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
    for _ in range(attempts):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise SystemExit(f"{error.code}: {json.load(error)['error']}") from None
            time.sleep(int(error.headers["Retry-After"]))
    raise SystemExit("the server is busy")


if __name__ == "__main__":
    print(predict([[0.5] * 64]))
