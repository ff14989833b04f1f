"""Asks a served model, and waits while it is busy: ``examples/client.py http://127.0.0.1:8000 '[[0, 0.5, ...]]'``."""

import json
import os
import sys
import time
import urllib.error
import urllib.request


def predict(address: str, inputs: list, attempts: int = 5) -> dict:
    """The answer to a list of samples; a busy server is asked again after the seconds that it names."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('HASTEN_TOKEN', '')}"}
    request = urllib.request.Request(f"{address}/predict", json.dumps({"inputs": inputs}).encode(), headers)
    for _ in range(attempts):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise SystemExit(f"{error.code}: {json.load(error)['error']}") from None
            time.sleep(int(error.headers.get("Retry-After", 1)))
        except urllib.error.URLError as error:
            raise SystemExit(f"no answer from {address}: {error.reason}") from None
    raise SystemExit("the server is busy")


if __name__ == "__main__":
    print(predict(sys.argv[1], json.loads(sys.argv[2])))
