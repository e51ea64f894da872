// Draws status.json once a second. All that comes from outside is set as text, never as markup.
"use strict";

const kInterval = 1000;  // ms between an answer and the next question
const kPatience = 5000;  // ms for one answer

const byId = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ------------------------------------------------------------------ figures as words

function scaled(value, units, step) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) {
    value /= step;
    ++unit;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}
const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const rate = (n) => scaled(n, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
const count = (n) => n.toLocaleString("en");
const percent = (share) =>
  share > 0 && share < 0.01 ? "under 1 %" : `${Math.floor(share * 100)} %`;
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const timeOf = (unixSeconds) =>
  new Date(unixSeconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

// ------------------------------------------------------------------ tables

// What a cell shows: text, and how. `done` in [0, 1] draws a bar before the text.
const cell = (text, className = "", done = undefined, title = "") =>
  ({ text: String(text), className, done, title });

function showCell(td, wanted, label) {
  const className = wanted.done === undefined ? wanted.className : `bar ${wanted.className}`;
  if (td.className !== className) td.className = className;
  if (td.dataset.label !== label) td.dataset.label = label;
  if (td.title !== wanted.title) td.title = wanted.title;
  const state = `${wanted.done}|${wanted.text}`;
  if (td.dataset.state === state) return;
  td.dataset.state = state;
  if (wanted.done === undefined) {
    td.textContent = wanted.text;
    return;
  }
  const bar = element("progress");
  bar.max = 1;
  bar.value = wanted.done;
  bar.setAttribute("aria-label", label);
  const words = element("span");
  words.append(bar, wanted.text);
  td.replaceChildren(words);
}

// Rows keep their elements as long as their keys stay, so that a selection survives a refresh.
function showTable(id, rows) {
  const table = byId(id);
  const labels = [...table.querySelectorAll("th")].map((th) => th.textContent);
  const body = table.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const shown = rows.map(({ key, cells }) => {
    const row = known.get(key) ?? element("tr");
    row.dataset.key = key;
    row.setAttribute("role", "row");
    while (row.cells.length < cells.length) row.append(element("td"));
    cells.forEach((wanted, i) => {
      row.cells[i].setAttribute("role", "cell");
      showCell(row.cells[i], wanted, labels[i]);
    });
    return row;
  });
  if (shown.length !== body.rows.length || shown.some((row, i) => row !== body.rows[i])) {
    body.replaceChildren(...shown);
  }
  table.hidden = rows.length === 0;
  table.parentElement.querySelector(".empty").hidden = rows.length > 0;
}

// ------------------------------------------------------------------ the parts of the page

const kRingColours = { ready: "good", forming: "warn", draining: "warn", empty: "bad" };

function showHead(status) {
  const badge = byId("state");
  badge.textContent = status.ring.state;
  badge.className = `badge ${kRingColours[status.ring.state] ?? ""}`;
  byId("about").textContent = `version ${status.version}, up ${duration(status.uptime_seconds)}, ` +
    `generation ${status.ring.generation}`;
  document.title = `${status.ring.state}, ${status.requests_in_flight} in flight · ringattn`;
}

function showFigures(status) {
  const { ring, queue, memory, stages } = status;
  const caches = status.kv_caches;
  const busy = Object.entries(stages).filter(([, n]) => n > 0).map(([name, n]) => `${n} ${name}`);
  const share = memory.bytes > 0 ? memory.reserved_bytes / memory.bytes : 0;
  const figures = [
    ["Workers in the ring", `${ring.members} of ${ring.workers}`,
      `${ring.hosts > 1 ? `on ${plural(ring.hosts, "host")}, ` : ""}formed again ` +
        (ring.reforms === 1 ? "once" : `${count(ring.reforms)} times`)],
    ["Requests in flight", count(status.requests_in_flight), busy.join(", ") || "none"],
    ["Waiting in the queue", `${count(queue.requests)} of ${count(queue.max_requests)}`,
      `${bytes(queue.bytes)} of ${bytes(queue.max_bytes)} to upload`],
    ["Memory reserved", bytes(memory.reserved_bytes),
      `${percent(share)} of the ring's ${bytes(memory.bytes)}`],
    ["K/V caches", `${count(caches.caches)} of ${count(caches.max_caches)}`,
      `${count(caches.open)} with a writer, ${bytes(caches.bytes)} on workers`],
  ];
  const list = byId("figures");
  figures.forEach(([name, value, more], i) => {
    const group = list.children[i] ?? list.appendChild(element("div"));
    if (group.children.length === 0) group.append(element("dt"), element("dd"));
    const state = `${name}|${value}|${more}`;
    if (group.dataset.state === state) return;
    group.dataset.state = state;
    group.children[0].textContent = name;
    group.children[1].replaceChildren(value, element("small", more));
  });
}

function locationText(worker) {
  const parts = [`host ${worker.host || "unknown"}`];
  if (worker.zone) parts.push(`zone ${worker.zone}`);
  if (worker.accelerator_domain) parts.push(`accelerator domain ${worker.accelerator_domain}`);
  if (worker.slot !== null) parts.push(`slot ${worker.slot}`);
  for (const { name, addresses } of worker.interfaces) {
    parts.push(`${name} ${addresses.join(" ")}`);
  }
  return parts.join(", ");
}

function hostLinkText(worker) {
  const parts = [];
  if (worker.host_link_bytes_per_second > 0) {
    parts.push(`to another host: ${rate(worker.host_link_bytes_per_second)}`);
  }
  if (worker.host_total_bytes_per_second > 0) {
    parts.push(`all workers of a host: ${rate(worker.host_total_bytes_per_second)}`);
  }
  return parts.join(", ");
}

function workerRow(worker) {
  const share = worker.memory_bytes > 0 ? worker.reserved_bytes / worker.memory_bytes : 0;
  const activity = worker.computes === ""
    ? cell("", "short")
    : cell(worker.waits_for_peer ? `${percent(worker.done)}, waits for a peer`
                                 : percent(worker.done),
           worker.waits_for_peer ? "short warn" : "short", worker.done,
           `operation ${worker.computes}`);
  return {
    key: `${worker.name} ${worker.incarnation}`,
    cells: [
      cell(worker.rank ?? "–", "number"),
      cell(worker.name, "key name"),
      cell(worker.host.slice(0, 12), "short", undefined, locationText(worker)),
      cell(worker.state, worker.state === "ready" ? "short good" : "short warn", undefined,
           worker.parted_from.length > 0 ? `cannot reach ${worker.parted_from.join(", ")}` : ""),
      activity,
      cell(`${bytes(worker.reserved_bytes)} of ${bytes(worker.memory_bytes)}`, "short", share,
           `${count(worker.kv_caches)} K/V caches hold ${bytes(worker.kv_cache_bytes)}`),
      cell(worker.link_bytes_per_second > 0 ? rate(worker.link_bytes_per_second) : "", "number",
           undefined, hostLinkText(worker)),
      cell(`${duration(worker.silence_seconds)} ago`,
           worker.silence_seconds > 3 ? "number bad" : "number"),
      cell(worker.device, "quiet"),
    ],
  };
}

const kStageWords = { reserving: "reserving memory", ready: "ready to run" };

function requestRow(request) {
  const on = request.members.length > 2
    ? `${request.members.length} workers` : request.members.join(", ");
  return {
    key: String(request.stream),
    cells: [
      cell(request.request_id, "key code", undefined,
           request.principal && `of ${request.principal}`),
      cell(request.direction, "short"),
      cell(kStageWords[request.stage] ?? request.stage,
           request.stage === "computing" ? "short busy" : "short"),
      request.done === null ? cell("", "short")
                            : cell(percent(request.done), "short", request.done),
      cell(count(request.query_tokens), "number"),
      cell(bytes(request.input_bytes), "number"),
      cell(duration(request.age_seconds), "number"),
      cell(request.deadline_seconds === null ? "" : duration(request.deadline_seconds), "number"),
      cell(on, "long", undefined, request.members.join(", ")),
      cell(request.trace_id, "code trace", undefined, request.trace_id),
    ],
  };
}

function lossRow(loss, index) {
  return {
    key: `${loss.time} ${loss.worker} ${index}`,
    cells: [
      cell(timeOf(loss.time), "short long"),
      cell(loss.worker, "key name"),
      cell(loss.rank ?? "–", "number"),
      cell(loss.reason.replaceAll("_", " "), "short bad long"),
      cell(loss.detail, "long"),
      cell(count(loss.ended_requests), "number"),
    ],
  };
}

function show(status) {
  showHead(status);
  showFigures(status);
  showTable("ring", status.workers.map(workerRow));
  showTable("requests", status.requests.map(requestRow));
  showTable("losses", status.losses.map(lossRow));
  const hidden = status.requests_in_flight - status.requests.length;
  byId("more").textContent = hidden > 0 ? `and ${plural(hidden, "more request")}` : "";
}

// ------------------------------------------------------------------ asking

let paused = false;
let answeredAt = null;  // when the last answer came
let timer = null;

function notice(text) {
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
  document.body.classList.toggle("stale", text !== "");
}

function showAge() {
  const age = answeredAt === null ? "" : `${duration((Date.now() - answeredAt) / 1000)} ago`;
  byId("updated").textContent = paused ? `paused, last updated ${age}` : "updated each second";
}

async function ask() {
  try {
    const reply = await fetch("status.json",
                              { cache: "no-store", signal: AbortSignal.timeout(kPatience) });
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    const status = await reply.json();
    answeredAt = Date.now();
    show(status);
    notice(status.age_seconds > 3
      ? `The coordinator's core has not answered for ${duration(status.age_seconds)}.` : "");
  } catch (error) {
    const since = answeredAt === null ? "" :
      ` This is how it was ${duration((Date.now() - answeredAt) / 1000)} ago.`;
    notice(`The coordinator does not answer.${since}`);
  }
}

async function turn() {
  timer = null;
  if (!paused && !document.hidden) await ask();
  showAge();
  timer = setTimeout(turn, kInterval);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Resume" : "Pause";
  showAge();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden || timer === null) return;
  clearTimeout(timer);
  turn();
});
turn();
