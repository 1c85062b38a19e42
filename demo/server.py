"""The running demo: our few routes beside Gradio's own."""

import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from .engine import Engine
from .limits import Limits
from .pictures import decode_picture, too_large
from .session import Session


STATIC = Path(__file__).resolve().parent / "static"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
# Gradio needs inline scripts and eval; what matters here is that nothing is ever loaded from, or sent to, elsewhere.
_POLICY = ("default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' "
           "'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; "
           "worker-src 'self' blob:; connect-src 'self' ws: wss:; object-src 'none'; base-uri 'self'")


class ContentPolicy:
    """Puts the content security policy on every answer, and refuses uploads that bypass our own bounded one."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"].rstrip("/").endswith(("/gradio_api/upload", "/upload")) and scope["method"] == "POST":
            request = Request(scope, receive)
            await _read(request, 0)
            return await JSONResponse({"error": "this server takes no files here"}, 403)(scope, receive, send)

        async def send_with_policy(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", _POLICY.encode()),
                                      (b"referrer-policy", b"same-origin"), (b"x-content-type-options", b"nosniff")]
            await send(message)

        await self.app(scope, receive, send_with_policy)


async def _read(request: Request, most: int) -> tuple[bytes | None, int]:
    """The body if it has at most `most` bytes, else None; and its size. The rest is read and dropped: a browser that
    cannot send its whole body shows no answer."""
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            data += part
        else:
            data.clear()
    return (bytes(data) if size <= most else None), size


class Demo:
    """A running demo: `url`, `share_url` (or None), `close()`. Also a context manager."""

    def __init__(self, pipe, limits: Limits):
        self._folder = tempfile.TemporaryDirectory(prefix="bc-diffusers-")
        self.folder, self.limits, self.pipe = Path(self._folder.name), limits, pipe
        self.engine = Engine(pipe, limits)
        self.sessions: dict[str, Session] = {}
        self.url = self.share_url = self._blocks = None

    # ------------------------------------------------------------------------------------------------ routes
    def routes(self) -> list:
        return [
            WebSocketRoute("/bc/stream", self._stream),
            Route("/bc/picture/{session}", self._picture, methods=["POST"]),
            Route("/bc/video/{key}", self._video, methods=["GET"]),
            *(Route(f"/bc/{path.name}", self._static(path), methods=["GET"]) for path in sorted(STATIC.iterdir())),
        ]

    async def _stream(self, socket: WebSocket) -> None:
        if not self._is_ours(socket):
            await socket.close(1008)
            return
        await socket.accept()
        session = Session(socket, self.engine, self.folder)
        self.sessions[session.key] = session
        try:
            await session.run()
        finally:
            del self.sessions[session.key]

    def _is_ours(self, request) -> bool:
        """Browsers let any page open a websocket to any address, and say from which page in `Origin`."""
        origin = request.headers.get("origin")
        if origin is None:  # not a browser
            return True
        asked = {request.headers.get("host"), self.share_url and urlsplit(self.share_url).netloc}
        return urlsplit(origin).netloc in asked

    async def _picture(self, request: Request) -> Response:
        session = self.sessions.get(request.path_params["session"])
        data, size = await _read(request, self.limits.picture_bytes)
        if session is None or not self._is_ours(request):
            return JSONResponse({"error": "This page's session is over: load the page again."}, 404)
        if data is None:
            return JSONResponse({"error": too_large(size, self.limits)}, 413)
        try:
            session.picture = await run_in_threadpool(decode_picture, data, self.limits)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        return JSONResponse({"width": session.picture.width, "height": session.picture.height})

    async def _video(self, request: Request) -> Response:
        key = request.path_params["key"]  # looked up, never made into a path
        for session in self.sessions.values():
            if key in session.videos:
                return FileResponse(session.videos[key], media_type="video/mp4", filename="bc_diffusers.mp4")
        return JSONResponse({"error": "This video is no longer here."}, 404)

    def _static(self, path: Path):
        async def answer(request: Request) -> Response:
            return FileResponse(path, headers={"cache-control": "no-cache"})

        return answer

    # ------------------------------------------------------------------------------------------------ life
    def launch(self, host: str = "127.0.0.1", port: int | None = None, share: bool = False) -> None:
        from starlette.middleware import Middleware

        from .page import HEAD, build_page, page_theme

        self._blocks = build_page(self)
        _, url, self.share_url = self._blocks.launch(
            server_name=host, server_port=port, share=share, prevent_thread_lock=True, quiet=True, inbrowser=False,
            ssr_mode=False, pwa=False, mcp_server=False, enable_monitoring=False, run_history=False, footer_links=[],
            max_file_size=1, theme=page_theme(), css_paths=[STATIC / "page.css"], head=HEAD,
            app_kwargs={"routes": self.routes(), "middleware": [Middleware(ContentPolicy)]})
        self.url = url.rstrip("/")

    def wait(self) -> None:
        """Blocks until Ctrl-C."""
        self._blocks.block_thread()

    def close(self) -> None:
        self.engine.close()
        if self._blocks is not None:
            self._blocks.close(verbose=False)
        self._folder.cleanup()

    def __enter__(self) -> "Demo":
        return self

    def __exit__(self, *_) -> None:
        self.close()
