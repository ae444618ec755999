"""An S3 server for tests: moto's, which keeps all objects in memory, behind a door that refuses."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
KEY = "test"  # the access key that the server knows
REFUSAL = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>{message}</Message></Error>"""


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Prints nothing, where werkzeug prints every request."""


class ObjectStore:
    """A running server with one bucket.

    Attributes:
        url: Its endpoint.
        refuses: Called with the method and the path of every request. If it returns True, the
            server answers with 403 AccessDenied.
        requests: The method and the path of every request so far.
    """

    def __init__(self) -> None:
        self.refuses: Callable[[str, str], bool] = lambda method, path: False
        self.requests: list[tuple[str, str]] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        self.requests.append((method, path))
        code = message = None
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            code = "InvalidAccessKeyId"
            message = "The access key does not exist."
        elif self.refuses(method, path):
            code = "AccessDenied"
            message = "Access Denied"
        if code is None:
            return self._moto(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start("403 Forbidden", [("Content-Type", "application/xml")])
        if method == "HEAD":
            return []
        return [REFUSAL.format(code=code, message=message).encode()]

    @contextlib.contextmanager
    def refusing(self, refuses: Callable[[str, str], bool]) -> Iterator[None]:
        """Refuses requests while the body runs."""
        self.refuses = refuses
        try:
            yield
        finally:
            self.refuses = lambda method, path: False

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running() -> Iterator[ObjectStore]:
    """Starts a server that this process and those that it starts find by their environment."""
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", store.url)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield store
    store.stop()
