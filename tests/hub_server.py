"""A small server that speaks the part of the Hub's API that reading and uploading take."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers for the repositories of the server: `server.repositories`, whose keys are
    "datasets/OWNER/NAME" or "models/OWNER/NAME" and whose values are bytes by file name. Committed
    files are added to them.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        for key, files in self.server.repositories.items():
            page = key.removeprefix("models/")
            if path == f"/api/{key}/tree/{COMMIT}" or path == f"/api/{key}/tree/main":
                return self.answer([self.entry(name, files[name]) for name in sorted(files)])
            if path in (
                f"/api/{key}",
                f"/api/{key}/revision/main",
                f"/api/{key}/revision/{COMMIT}",
            ):
                siblings = [
                    {"rfilename": name, "size": len(content)} for name, content in files.items()
                ]
                return self.answer(
                    {"_id": "0", "id": key.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}
                )
            resolve = re.fullmatch(rf"/{page}/resolve/(?:main|{COMMIT})/(.+)", path)
            if resolve and resolve[1] in files:
                content = files[resolve[1]]
                return self.send(
                    200,
                    content,
                    {
                        "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                        "X-Repo-Commit": COMMIT,
                    },
                )
        if path == "/api/whoami-v2":
            if self.headers.get("Authorization") != "Bearer hf_right":
                return self.refuse(401, "Invalid username or password.")
            return self.answer({"type": "user", "name": "owner"})
        return self.refuse(404, "Repository Not Found", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, body))
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self.refuse(401, "Invalid username or password.")
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            request = json.loads(body)
            owner = request.get("organization", "owner")
            name = f"{owner}/{request['name']}"
            self.server.repositories.setdefault(f"models/{name}", {})
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "id": "0"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        commit = re.fullmatch(r"/api/(models/.+)/(preupload|commit)/main", path)
        if commit is None or commit[1] not in self.server.repositories:
            return self.refuse(404, "Repository Not Found")
        if commit[2] == "preupload":
            files = json.loads(body)["files"]
            return self.answer(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                content = base64.b64decode(item["value"]["content"])
                self.server.repositories[commit[1]][item["value"]["path"]] = content
        url = f"http://{self.headers['Host']}/{commit[1].removeprefix('models/')}/commit/{COMMIT}"
        return self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def entry(self, name, content):
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }

    def answer(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, message, headers=None):
        self.send(status, json.dumps({"error": message}).encode(), headers or {})

    def send(self, status, body, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(
    repositories: dict[str, dict[str, bytes]],
) -> Iterator[tuple[http.server.ThreadingHTTPServer, Mapping[str, str]]]:
    """Yields the server, and the environment variables with which the Hub's client asks it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories = repositories
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    try:
        yield server, environment
    finally:
        server.shutdown()
        server.server_close()
