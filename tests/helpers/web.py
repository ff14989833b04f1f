"""A web server for tests: it serves ranges, and fails, truncates responses or omits versions as configured."""

import hashlib
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        server.asked.append((self.command, self.path, time.monotonic()))
        if server.closing.get(self.path.rstrip("/"), 0):
            server.closing[self.path.rstrip("/")] -= 1
            self.close_connection = True
            return
        if server.login and self.headers.get("Authorization") != server.login:
            return self.send_error(401)
        if server.failing:
            server.failing -= 1
            return self.send_error(server.status)
        content = server.content.get(self.path)
        if content is None:
            content, kind = self.listed(), "text/html"
        else:
            kind = "application/octet-stream"
        if content is None:
            return self.send_error(404)
        self.given(content, kind)

    def given(self, content, kind):
        server, begin, end = self.server, 0, len(content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if server.ranges else None
        if wanted:
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
            if begin >= len(content):
                return self.send_error(416)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(end - begin))
        if server.marked:
            self.send_header("ETag", hashlib.md5(content).hexdigest())
        self.end_headers()
        if self.command == "GET":
            part = content[begin:end]
            if server.breaking:
                server.breaking -= 1
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                return
            self.wfile.write(part)

    def listed(self):
        """Returns the HTML listing of a directory."""
        directory = self.path.rstrip("/") + "/"
        names = {
            path.removeprefix(directory).partition("/") for path in self.server.content if path.startswith(directory)
        }
        links = "".join(f'<a href="{name}{slash}">{name}</a>\n' for name, slash, _ in sorted(names))
        return f"<html><body>{links}</body></html>".encode() if names else None

    def log_message(self, *argv):
        pass


class Web(ThreadingHTTPServer):
    """``content`` by path.

    Attributes:
        asked: (method, path, time) of every request.
        failing: number of further requests that are answered with ``status``.
        closing: path -> number of further requests that get no response.
        breaking: number of further responses that are truncated in the middle.
        login: Authorization header that every request must have; None if not required.
        ranges, marked: whether it serves ranges, and sends version headers.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, content):
        super().__init__(("127.0.0.1", 0), Answer)
        self.content, self.asked, self.failing, self.status, self.breaking = dict(content), [], 0, 503, 0
        self.ranges = self.marked = True
        self.closing, self.login = {}, None

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(content):
    """Runs the server in a thread, on a free port."""
    web = Web(content)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
