"""The coordinator's live page: by HTTP, and, where Chromium is installed (./tests/run.sh --full sees
to it), in a real browser.

RINGATTN_SCREENSHOTS=docs writes the guide's pictures there, with names that are not odd.
"""

import json
import os
import pathlib
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

import browser
from attention import chunks_of, header_for, make_inputs, requests, run
from cluster import CHANNEL_OPTIONS, WORKER, wait_until
from stubs import attention_pb2 as pb, attention_pb2_grpc
from timing import in_time, timed

EVIL = "<img src=x onerror=document.title='owned'>"
SCREENSHOTS = os.environ.get("RINGATTN_SCREENSHOTS")
ODD_WORKER = "worker-4" if SCREENSHOTS else EVIL
ODD_REQUEST = "serve-0af7651916cd43dd" if SCREENSHOTS else EVIL
PARTS = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript",
         "/status.json": "application/json", "/metrics": "text/plain"}


def get(ring, path, method="GET"):
    request = urllib.request.Request(f"http://{ring.ports['metrics']}{path}", method=method)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply, reply.read().decode()


def status(ring):
    return json.loads(get(ring, "/status.json")[1])


class Held:
    """A request whose upload stops after `sent` of its chunks until `finish`."""

    def __init__(self, attention, request_id, inputs=None, sent=0, **options):
        self.inputs = inputs or make_inputs(sq=64)
        self.go_on = threading.Event()
        chunks = list(chunks_of(self.inputs, ["q", "k", "v"], chunk_bytes=8192))

        def upload():
            yield from chunks[:sent]
            self.go_on.wait(60)
            yield from chunks[sent:]

        self.call = attention.Forward(
            requests(header_for(self.inputs, request_id=request_id, **options), upload()),
            timeout=120)

    def accepted(self):
        return next(self.call).accepted

    def finish(self):
        self.go_on.set()
        list(self.call)

    def cancel(self):
        self.go_on.set()
        self.call.cancel()


def test_the_parts_and_what_browsers_are_told(ring):
    for path, content_type in PARTS.items():
        reply, body = get(ring, path)
        assert reply.headers["Content-Type"].startswith(content_type) and body
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Cache-Control"] == "no-store"
        assert get(ring, path, "HEAD")[1] == ""
    page = get(ring, "/")[1]
    # Nothing inline, which the policy would forbid, and nothing from elsewhere.
    assert not re.search(r"<style|style=|<script>|\son\w+=|https?://", page)
    for path, method in (("/nothing", "GET"), ("/../etc/passwd", "GET"), ("/", "POST")):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(ring, path, method)
        assert error.value.code == (405 if method == "POST" else 404)


def test_an_idle_ring(ring):
    shown = status(ring)
    assert shown["ring"]["state"] == "ready" and shown["ring"]["members"] == 4
    assert [w["rank"] for w in shown["workers"]] == [0, 1, 2, 3]
    assert all(w["state"] == "ready" and w["silence_seconds"] < 5 for w in shown["workers"])
    assert shown["requests"] == [] and shown["requests_in_flight"] == 0
    assert shown["age_seconds"] < 2 and shown["uptime_seconds"] > 0


def test_a_request_and_its_stage(ring):
    inputs = make_inputs(sq=512, heads=2, dim=16)  # q, k and v of 64 KiB each
    held = Held(ring.attention, EVIL, inputs, sent=12, schedule=pb.SCHEDULE_RING, world_size=2)
    members = list(held.accepted().plan.members)
    row = wait_until(lambda: [r for r in status(ring)["requests"] if r["done"] == 0.5], 10,
                     "half of the upload")[0]
    assert (row["request_id"], row["stage"], row["members"]) == (EVIL, "uploading", members)
    assert row["query_tokens"] == 512 and row["input_bytes"] == 3 * 65536
    assert 0 <= row["age_seconds"] < 30 and 0 < row["deadline_seconds"] < 130
    assert status(ring)["stages"]["uploading"] == 1
    held.finish()
    wait_until(lambda: status(ring)["requests_in_flight"] == 0, 10, "its end")


def test_however_many_are_in_flight_the_page_stays_small(make_ring):
    # Who uploads nothing would have to go while others wait.
    ring = make_ring(workers=1, server_flags=["--upload_grace_contended=60s"])
    channels = [grpc.insecure_channel(ring.address, CHANNEL_OPTIONS) for _ in range(2)]
    stubs = [attention_pb2_grpc.AttentionServiceStub(channel) for channel in channels]
    inputs = make_inputs(sq=8)
    many = [Held(stubs[i % 2], f"{i:03}-{'x' * 120}", inputs) for i in range(160)]
    wait_until(lambda: status(ring)["requests_in_flight"] == 160, 20, "160 requests")
    body = get(ring, "/status.json")[1]
    shown = json.loads(body)
    assert len(shown["requests"]) == 64 and len(body) < 64 << 10
    assert sum(shown["stages"].values()) == 160
    # Those that hold memory come first.
    stages = [row["stage"] for row in shown["requests"]]
    assert stages == sorted(stages, key=lambda stage: stage in ("queued", "planning"))
    assert shown["stages"]["queued"] > 64
    for held in many:
        held.cancel()
    for channel in channels:
        channel.close()
    wait_until(lambda: status(ring)["requests_in_flight"] == 0, 20, "their end")


@timed
def test_many_who_look_do_not_disturb_the_service(ring):
    stop, seen = threading.Event(), []

    def look():
        while not stop.is_set():
            seen.append(status(ring)["age_seconds"])

    lookers = [threading.Thread(target=look) for _ in range(8)]
    [t.start() for t in lookers]
    times = []
    while len(times) < 5 or len(seen) < 32:
        start = time.monotonic()
        run(ring.attention, make_inputs(sq=64))
        times.append(time.monotonic() - start)
    stop.set()
    [t.join() for t in lookers]
    in_time(max(seen) < 2 and sorted(times)[len(times) // 2] < 2, (seen, times))


def test_half_requests_keep_nobody_out(ring):
    host, port = ring.ports["metrics"].split(":")
    silent = []
    for _ in range(40):
        silent.append(socket.create_connection((host, int(port))))
        silent[-1].send(b"GET /sta")
    start = time.monotonic()
    assert status(ring)["ring"]["state"] == "ready"
    assert time.monotonic() - start < 10
    for connection in silent:
        connection.close()


def test_who_was_lost(make_ring):
    ring = make_ring(workers=2)
    held = Held(ring.attention, "lost", schedule=pb.SCHEDULE_RING, world_size=2)
    held.accepted()
    ring.kill_worker(1)
    loss = wait_until(lambda: status(ring)["losses"], 10, "a loss")[0]
    held.cancel()
    assert (loss["worker"], loss["rank"], loss["reason"]) == ("worker-1", 1, "disconnected")
    assert loss["ended_requests"] == 1 and "closed" in loss["detail"]
    assert abs(loss["time"] - time.time()) < 30


# ------------------------------------------------------------------ in a browser


@pytest.fixture
def page(tmp_path):
    if browser.CHROMIUM is None:
        pytest.skip("chromium is not installed; ./tests/run.sh --full installs it")
    made = browser.Browser(tmp_path)
    yield made
    made.close()


def text_of(page, selector):
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def problems(page):
    """Returns the browser's errors about the page."""
    return [(method, event) for method, event in page.events
            if method == "Runtime.exceptionThrown"
            or method == "Log.entryAdded" and event["entry"]["level"] in ("warning", "error")]


CONTRAST = """(() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => { const [r, g, b] = rgb.match(/[0-9.]+/g).map(Number).map(channel);
                           return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll("h1, h2, dt, dd, small, th, td, p, .badge")]
    .filter((e) => e.innerText).map((e) => light(getComputedStyle(e).color))
    .map((ink) => (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)));
})()"""


def odd_ring(make_ring):
    """A ring with a worker of an odd name, in which one was lost."""
    ring = make_ring(workers=4)
    ring.workers[4] = ring._spawn("worker-4", [
        WORKER, f"--coordinator={ring.control_address}", f"--secret_file={ring.secret}",
        f"--name={ODD_WORKER}", "--device=cpu", "--threads=1"])
    ring.wait_ready(5)
    ring.kill_worker(3)
    ring.wait_ready(4)
    return ring


def test_in_a_browser(make_ring, page, tmp_path):
    ring = odd_ring(make_ring)
    traceparent = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    large = make_inputs(sq=12288, heads=8, dim=64)
    stop = threading.Event()

    def compute(index):
        number = 0
        while not stop.is_set():
            header = header_for(large, request_id=f"train-{index}-{number}", causal=True,
                                schedule=pb.SCHEDULE_RING, world_size=4)
            number += 1
            list(ring.attention.Forward(requests(header, chunks_of(large, ["q", "k", "v"])),
                                        metadata=traceparent, timeout=120))

    loaders = [threading.Thread(target=compute, args=(i,)) for i in range(3)]
    [t.start() for t in loaders]
    held = [Held(ring.attention, ODD_REQUEST, sent=1, world_size=2, schedule=pb.SCHEDULE_RING),
            Held(ring.attention, "eval-7", make_inputs(sq=2048), sent=40, world_size=1)]
    try:
        look_at(page, ring, tmp_path)
    finally:
        stop.set()
        for one in held:
            one.finish()
        [t.join() for t in loaders]
    # A coordinator that is gone: the page says so and keeps what it knew.
    ring.kill_server()
    page.wait("document.querySelector('#notice').textContent.includes('does not answer')", 15)
    assert page.evaluate("document.querySelectorAll('#ring tbody tr').length") == 4


def look_at(page, ring, tmp_path):
    page.show(1280, 800)
    page.call("Page.navigate", url=f"http://{ring.ports['metrics']}/")
    page.wait("document.querySelector('#state')?.textContent === 'ready'")
    page.wait("[...document.querySelectorAll('#requests td')].some("
              "(td) => td.innerText.startsWith('computing'))", 30)
    # Values from clients and workers are shown as text.
    assert ODD_REQUEST in text_of(page, "#requests") and ODD_WORKER in text_of(page, "#ring")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.title").startswith("ready, ")
    assert "worker-3" in text_of(page, "#losses") and "disconnected" in text_of(page, "#losses")
    assert page.evaluate("document.querySelectorAll('#ring tbody tr').length") == 4
    assert "0af7651916cd43dd8448eb211c80319c" in text_of(page, "#requests")
    # It refreshes itself, keeps the rows that stay, and pauses.
    page.evaluate("window.kept = document.querySelector('#ring tbody tr'); "
                  "window.shown = document.querySelector('#figures').innerText")
    page.wait("document.querySelector('#figures').innerText !== window.shown "
              "|| performance.getEntriesByName(location.href + 'status.json').length > 3")
    assert page.evaluate("document.querySelector('#ring tbody tr') === window.kept")
    page.evaluate("document.querySelector('#pause').click()")
    assert page.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    count = page.evaluate("performance.getEntriesByType('resource').length")
    time.sleep(2.5)
    assert page.evaluate("performance.getEntriesByType('resource').length") <= count + 1
    page.evaluate("document.querySelector('#pause').click()")
    # Everything came from this server, and nothing broke its policy.
    urls = [event["request"]["url"] for method, event in page.events
            if method == "Network.requestWillBeSent"]
    assert urls and all(url.startswith(f"http://{ring.ports['metrics']}/") or url == "about:blank"
                        for url in urls), urls
    assert not problems(page), problems(page)
    check_looks(page, tmp_path)
    check_accessible(page)


def check_looks(page, tmp_path):
    """Light and dark, wide and narrow: legible, and nothing sticks out."""
    folder = pathlib.Path(SCREENSHOTS or tmp_path)
    grounds = set()
    for name, width, scheme in (("live-page", 1280, "light"), ("live-page-dark", 1280, "dark"),
                                ("live-page-phone", 390, "light")):
        page.show(width, 800, scheme)
        page.wait(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(CONTRAST) >= 4.5, name  # WCAG AA
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.screenshot(folder / f"{name}.png")
        assert 10_000 < (folder / f"{name}.png").stat().st_size < 300_000
    assert len(grounds) == 2
    page.show(1280, 800)


def check_accessible(page):
    """The page's accessibility tree: landmarks, tables with their headers, bars with names."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node.get("ignored")]
    named = {(node["role"]["value"], node["name"]["value"]) for node in nodes
             if not node.get("ignored") and "name" in node}
    for role in ("main", "banner", "status"):
        assert role in roles, role
    assert roles.count("table") == 3 and roles.count("columnheader") == 9 + 10 + 6
    assert {("heading", "Ring"), ("heading", "Requests in flight"),
            ("heading", "Last losses")} <= named
    bars = [node for node in nodes if node["role"]["value"] == "progressbar"]
    assert bars and all(node["name"]["value"] for node in bars)
    assert ("button", "Pause") in named
    assert page.evaluate("document.documentElement.lang") == "en"
