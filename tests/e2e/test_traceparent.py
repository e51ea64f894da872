"""W3C trace context: from the client's metadata to the logs of every process, the report and the
live page; an invalid value is ignored and logged."""

import json
import subprocess
import threading
import urllib.request

from attention import chunks_of, header_for, make_inputs, requests
from cluster import CLI, wait_until
from stubs import attention_pb2 as pb

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def forward(ring, request_id, metadata, inputs=None):
    """A forward with this metadata; its Accepted."""
    inputs = inputs or make_inputs(sq=64)
    header = header_for(inputs, request_id=request_id, schedule=pb.SCHEDULE_RING, world_size=2)
    replies = list(ring.attention.Forward(requests(header, chunks_of(inputs, ["q", "k", "v"])),
                                          metadata=metadata, timeout=30))
    assert replies[-1].WhichOneof("message") == "summary"
    return replies[0].accepted


def lines_of(ring, name, request_id):
    """The log lines of a process that name this request."""
    lines = []
    for text in (ring.directory / f"{name}.log").read_text().splitlines():
        line = json.loads(text) if text.startswith("{") else {}
        if line.get("request_id") == request_id:
            lines.append(line)
    return lines


def logged(ring, name, request_id, messages):
    """Returns those lines once they include all `messages`: logs are written after the call."""
    def found():
        lines = lines_of(ring, name, request_id)
        return lines if {line["message"] for line in lines} >= set(messages) else None
    return wait_until(found, 10, f"{messages} of {request_id} in {name}'s log")


def test_it_is_on_every_line_of_the_request_in_every_process(ring):
    accepted = forward(ring, "traced", [("traceparent", TRACEPARENT)])
    assert accepted.traceparent == TRACEPARENT
    lines = logged(ring, "server", "traced", ["request arrived", "request ended"])
    for member in accepted.plan.members:
        lines += logged(ring, member, "traced", ["run ended"])
    assert [line["traceparent"] for line in lines] == [TRACEPARENT] * len(lines)
    ended = lines[-1]
    assert ended["code"] == "OK" and ended["operation_id"] and ended["generation"] > 0


def test_a_failure_s_lines_carry_it_too(ring):
    inputs = make_inputs(sq=64)
    call = ring.attention.Forward(
        requests(header_for(inputs, request_id="traced-cancel"), iter(())),
        metadata=[("traceparent", TRACEPARENT)], timeout=30)
    next(call)
    ring.attention.Cancel(pb.CancelRequest(request_id="traced-cancel"))
    ended = logged(ring, "server", "traced-cancel", ["request ended"])[-1]
    assert (ended["code"], ended["traceparent"]) == ("CANCELLED", TRACEPARENT)


def test_what_is_not_valid_is_ignored_and_said(ring):
    bad = [[("traceparent", TRACEPARENT.upper())],
           [("traceparent", f"00-{'0' * 32}-b7ad6b7169203331-01")],
           [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
           [("traceparent", "x" * 4000)]]
    for index, metadata in enumerate(bad):
        accepted = forward(ring, f"bad-{index}", metadata)
        assert accepted.traceparent == ""
        lines = logged(ring, "server", f"bad-{index}", ["request ended"])
        lines += logged(ring, accepted.plan.members[0], f"bad-{index}", ["run ended"])
        assert {line["traceparent"] for line in lines} == {""}
    log = (ring.directory / "server.log").read_text()
    said = [json.loads(line) for line in log.splitlines() if "not a valid traceparent" in line]
    assert len(said) == len(bad) and all(len(line["value"]) <= 64 for line in said)


def test_without_one_there_is_none(ring):
    assert forward(ring, "untraced", []).traceparent == ""


def test_the_live_page_shows_whose_trace_it_is(ring):
    inputs, go_on = make_inputs(sq=64), threading.Event()

    def held_back():
        go_on.wait(20)
        yield from chunks_of(inputs, ["q", "k", "v"])

    call = ring.attention.Forward(requests(header_for(inputs, request_id="shown"), held_back()),
                                  metadata=[("traceparent", TRACEPARENT)], timeout=30)
    next(call)
    url = f"http://{ring.ports['metrics']}/status.json"
    rows = wait_until(lambda: json.load(urllib.request.urlopen(url, timeout=5))["requests"], 10,
                      "the request on the page")
    go_on.set()
    list(call)
    assert [(row["request_id"], row["trace_id"]) for row in rows] == [("shown", TRACE_ID)]


def test_the_command_line_sends_it_and_reports_it(ring, tmp_path):
    subprocess.run([CLI, "generate", f"--output={tmp_path}/in", "--seq_len=64", "--heads=2",
                    "--head_dim=16"], check=True, capture_output=True)
    command = [CLI, "forward", f"--server={ring.address}", f"--input={tmp_path}/in",
               f"--output={tmp_path}/out", f"--trace={tmp_path}/trace", "--json"]
    done = subprocess.run([*command, f"--traceparent={TRACEPARENT}", "--request_id=by-cli"],
                          check=True, capture_output=True)
    assert json.loads(done.stdout)["traceparent"] == TRACEPARENT
    traced = json.loads((tmp_path / "trace").read_text())["otherData"]
    assert (traced["request_id"], traced["traceparent"]) == ("by-cli", TRACEPARENT)
    done = subprocess.run([*command, "--traceparent=00-not-valid"], capture_output=True, text=True)
    assert done.returncode != 0 and "traceparent" in done.stdout + done.stderr
