"""A small HTTP service over one encoder, with nothing but the standard library.

    python examples/asyncio_service.py CHECKPOINT [--device cpu] [--port 8000]
    curl --data-binary @photo.jpg http://127.0.0.1:8000/embed

POST /embed    an image as the body; answers with shape, grid and hash of its rows, as JSON
GET  /ready    200 while new images are accepted, else 503: for the load balancer
GET  /live     200 until no replica is left, then 500: for the supervisor that restarts the process
GET  /metrics  counters and gauges in Prometheus' text format

An overloaded service answers 429 or 503 at once instead of queueing without bound, an image that no replica
takes in time gets 504, an image whose client has gone gives its place to another, and SIGTERM finishes what
was accepted. A server in front of a language model would pass the rows on inside this process; here only
their shape is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_encoder import (
    DeadlineExceededError,
    Encoder,
    EncoderBusyError,
    EncoderClosedError,
    EncoderState,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    MMEncoderError,
    PlanMismatchError,
    UnsupportedMediaError,
)

# The first that fits; errors of the caller's image come before faults of the service.
STATUS: tuple[tuple[type[MMEncoderError], int], ...] = (
    (MediaTooLargeError, 413),
    (UnsupportedMediaError, 415),
    (MediaError, 400),
    (PlanMismatchError, 400),  # where the client passes `expected_tokens`
    (EncoderBusyError, 429),
    (EncoderClosedError, 503),
    (DeadlineExceededError, 504),
    (MMEncoderError, 500),
)
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 411: "Length Required", 413: "Content Too Large"}
REASONS |= {415: "Unsupported Media Type", 429: "Too Many Requests", 500: "Internal Server Error"}
REASONS |= {503: "Service Unavailable", 504: "Gateway Timeout"}
CLIENT_GONE = 499  # never sent; counted as other servers do
Answer = tuple[int, dict[str, Any] | str]
"""A status, and JSON or plain text."""
OUTCOMES = ("succeeded", "failed", "cancelled", "late", "refused", "joined")


class Service:
    """One encoder behind HTTP/1.1, one request per connection. `options` are those of the command line."""

    def __init__(self, encoder: Encoder, limits: MediaLimits, options: argparse.Namespace) -> None:
        self.encoder, self.limits, self.options = encoder, limits, options
        self.handlers: set[asyncio.Task[Any]] = set()
        self.responses: Counter[int] = Counter()

    async def run(self, port: int) -> None:
        """Serve until SIGTERM or SIGINT, then finish every request that was accepted."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with self.encoder:  # closes it without blocking the loop
            server = await asyncio.start_server(self.handle, "127.0.0.1", port)
            print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
            await stop.wait()
            server.close()
            if self.handlers:
                await asyncio.wait(self.handlers)
        stats = self.encoder.stats()
        print(
            f"closed: {stats.succeeded} encoded, {stats.refused} refused, {stats.failed} failed", flush=True
        )

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and answer it."""
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        task.add_done_callback(self.handlers.discard)
        try:
            async with asyncio.timeout(self.options.receive):
                method, path, body, status = await self.read(reader)
            content: dict[str, Any] | str = {}
            if status == 200:
                status, content = await unless_gone(reader, self.answer(method, path, body))
            self.responses[status] += 1
            if status == CLIENT_GONE:
                return
            kind, text = "application/json", json.dumps(content)
            if isinstance(content, str):
                kind, text = "text/plain; version=0.0.4; charset=utf-8", content
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            head += "Retry-After: 1\r\n" if status in (429, 503) else ""
            data = text.encode()
            writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            await writer.drain()
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            writer.close()

    async def read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes, int]:
        """Method, path and body, and 200 unless the body must not be read."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (f.partition(":") for f in head[1:])
        }
        if method != "POST":
            return method, path, b"", 200
        if "content-length" not in fields:
            return method, path, b"", 411
        length = int(fields["content-length"])
        if length > self.limits.max_bytes:  # before a byte of it is kept
            return method, path, b"", 413
        if len(self.handlers) > self.options.open_requests:  # each holds its body
            return method, path, b"", 503
        return method, path, await reader.readexactly(length), 200

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Status and content for a request."""
        health = self.encoder.health()
        if (method, path) == ("GET", "/metrics"):
            return 200, self.metrics()
        if (method, path) == ("GET", "/ready"):
            return (200 if health.serving else 503), {"state": health.state}
        if (method, path) == ("GET", "/live"):
            return (500 if health.state is EncoderState.FAILED else 200), {"last_error": health.last_error}
        if (method, path) != ("POST", "/embed"):
            return 404, {}
        try:
            ((rows, metadata),) = await self.encoder.generate_async(
                body, timeout=self.options.patience, deadline=time.monotonic() + self.options.deadline
            )
        except MMEncoderError as error:
            status = next(status for kind, status in STATUS if isinstance(error, kind))
            return status, {"error": type(error).__name__, "message": str(error)}
        return 200, {
            "shape": list(rows.shape),
            "grid_thw": metadata.grid_thws[0],
            "mm_hash": metadata.mm_hash,
        }

    def metrics(self) -> str:
        """What a monitoring system scrapes."""
        stats, health = self.encoder.stats(), self.encoder.health()
        lines = []
        for name, label, values in (
            ("responses_total", "status", self.responses),
            ("images_total", "outcome", {outcome: getattr(stats, outcome) for outcome in OUTCOMES}),
            ("errors_total", "error", dict(stats.errors)),
            ("stage_p95_milliseconds", "stage", {stage.stage: stage.p95 for stage in stats.stages}),
        ):
            lines.append(f"# TYPE mm_encoder_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [f'mm_encoder_{name}{{{label}="{of}"}} {value}' for of, value in values.items()]
        for name, value in (
            ("open_requests", len(self.handlers)),
            ("images_in_flight", stats.in_flight),
            ("queue_length", health.queue_length),
        ):
            lines += [f"# TYPE mm_encoder_{name} gauge", f"mm_encoder_{name} {value}"]
        return "\n".join([*lines, ""])


async def unless_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Await `answer`; cancel it once the client has closed the connection, or only its sending side."""

    async def wait_for_end() -> None:
        with suppress(OSError):
            while await reader.read(1024):  # what follows the request is not answered
                pass

    answering, gone = asyncio.create_task(answer), asyncio.create_task(wait_for_end())
    await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not answering.done():
        answering.cancel()  # an image that no replica has taken releases its slot
        await asyncio.wait((answering,))
        return CLIENT_GONE, {}
    return answering.result()


def main() -> None:
    """Load the encoder, then serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--queue-depth", type=int, help="images accepted and not yet running")
    parser.add_argument("--patience", type=float, default=0.05, help="seconds to wait for a slot before 429")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds until an image that waits fails")
    parser.add_argument(
        "--receive", type=float, default=30.0, help="seconds that a request may take to arrive"
    )
    parser.add_argument("--open-requests", type=int, default=32, help="connections before 503")
    arguments = parser.parse_args()
    limits = MediaLimits(max_bytes=32 * 1024**2, max_pixels=50_000_000)
    # Before the loop runs: loading the weights would block it.
    encoder = Encoder(
        arguments.checkpoint, device=arguments.device, queue_depth=arguments.queue_depth, limits=limits
    )
    asyncio.run(Service(encoder, limits, arguments).run(arguments.port))


if __name__ == "__main__":
    main()
