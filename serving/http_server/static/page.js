// The live page of an amoeba server.

import { Charts, formatTime } from "./charts.js";
import { Cluster, element, formatBytes, span } from "./devices.js";

const TOKEN = "amoeba-admin-token";
const MAX_DECISIONS = 100;
const MAX_ENDED = 4;
const STALE_S = 3;

const find = (id) => document.getElementById(id);
const cluster = new Cluster();
const charts = new Charts();
let state = null;
let receivedAt = 0;
let problem = "";
let aborter = null;

function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { authorization: `Bearer ${token}` } : {};
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

// Stream of events

async function follow() {
  let wait = 500;
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    try {
      aborter = new AbortController();
      const response = await fetch("cluster/events", { headers: headers(), signal: aborter.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        const wrong = response.status === 403 || sessionStorage.getItem(TOKEN);
        showStatus("token needed");
        await login(wrong ? await errorText(response) : "");
        continue;
      }
      if (!response.ok) throw new Error(await errorText(response));
      problem = "";
      wait = 500;
      await read(response.body);
      problem = "connection lost";
    } catch (error) {
      if (document.hidden) continue;
      problem = error instanceof TypeError ? "no connection" : error.message;
    }
    showAge();
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, 8000);
  }
}

async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const messages = text.split("\n\n");
    text = messages.pop();
    // Messages that arrived together: the figures of each, but only the last state.
    for (const message of messages) {
      const fields = Object.fromEntries(message.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) take(fields.event, JSON.parse(fields.data));
    }
  }
}

function take(name, message) {
  receivedAt = performance.now();
  charts.add(message.seconds ?? []);
  addDecisions(message.decisions ?? []);
  if (name !== "state") return;
  state = message;
  render();
}

document.addEventListener("visibilitychange", () => {
  // A hidden page needs no messages. The history arrives again when it is shown.
  if (document.hidden) aborter?.abort();
});

function login(text) {
  find("login").hidden = false;
  find("page").hidden = true;
  find("login-error").textContent = text;
  find("token").focus();
  return new Promise((resolve) => {
    find("login").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN, find("token").value.trim());
      find("token").value = "";
      find("login").hidden = true;
      resolve();
    }, { once: true });
  });
}

// State

function showStatus(text, kind = "") {
  const status = find("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `status ${kind}`;
}

function showAge() {
  const age = (performance.now() - receivedAt) / 1000;
  const stale = age > STALE_S || state === null;
  find("page").classList.toggle("stale", stale);
  if (!find("login").hidden) return;
  if (problem) showStatus(problem, "bad");
  else if (state === null) showStatus("connecting");
  else if (stale) showStatus(`no data for ${Math.round(age)} s`, "bad");
  else showStatus(state.state, state.state === "ready" ? "good" : "bad");
}

function render() {
  showAge();
  if (!state.instances) return;
  find("page").hidden = false;
  find("model").textContent = state.model;
  find("policy").textContent = state.policy ? `policy ${state.policy}` : "no scheduler";
  cluster.update(state);
  trackChanges();
  charts.draw(state.time_s, spans);
  renderTotals();
  renderQueue();
  renderControls();
  const degrees = state.instances.map(({ degree }) => `TP${degree}`);
  const counts = [...new Set(degrees)].map((name) => `${degrees.filter((it) => it === name).length} × ${name}`);
  document.title = `${counts.join(", ")} · amoeba`;
}

function setTotal(id, value, unit = "") {
  const target = find(id);
  target.textContent = value;
  if (unit) target.append(element("small", ` ${unit}`));
}

function renderTotals() {
  setTotal("total-tokens", Math.round(charts.mean(1, 5)).toLocaleString("en"));
  const parts = (seconds) => formatTime(seconds).split(" ");
  setTotal("total-ttft", ...parts(charts.latest(2)));
  setTotal("total-itl", ...parts(charts.latest(4)));
  setTotal("total-running", state.running, state.paused ? `+ ${state.paused} paused` : "");
  setTotal("total-waiting", state.waiting);
  setTotal("total-kv", Math.round(100 * state.kv_usage), "%");
}

function renderQueue() {
  find("queue").replaceChildren(...state.queue.map(({ name, requests, tokens }) => {
    const row = element("tr");
    row.append(element("td", name), element("td", requests.toLocaleString("en")), element("td", tokens.toLocaleString("en")));
    return row;
  }));
}

// Changes: the present ones come with each state, and this page remembers those that ended while it watched.

const present = new Map();
const ended = [];
let spans = [];

function changeName(change) {
  const devices = `${change.devices.length > 1 ? "devices" : "device"} ${span(change.devices)}`;
  if (change.kind === "transform") return `${change.verb} ${devices} to TP${change.degree}`;
  const layers = change.end ? ` layers ${span([change.first, change.end - 1])}` : "";
  return `${change.kind.replace("_", " ")}${layers} of instance ${change.instance}, ${devices}`;
}

// Return whether a transformation merges or splits, by the degrees of the layers that have not switched.
function verb(change) {
  const degrees = state.instances.filter(({ devices }) => devices.some((it) => change.devices.includes(it)))
    .flatMap(({ degree, runs }) => [degree, ...runs.flatMap(({ homes }) => homes.map((home) => home[1]))]);
  if (degrees.some((degree) => degree < change.degree)) return "merge";
  return degrees.some((degree) => degree > change.degree) ? "split" : "";
}

function trackChanges() {
  const keys = new Set();
  for (const change of state.changes) {
    const key = JSON.stringify([change.kind, change.degree, change.devices, change.first, change.end]);
    keys.add(key);
    const known = present.get(key);
    const named = verb(change) || known?.change.verb || "change";
    present.set(key, { change: { ...change, verb: known?.change.verb ?? named }, start: known?.start ?? state.time_s });
    if (!known) announce(`${changeName({ ...change, verb: named })} has started`);
  }
  for (const [key, { change, start }] of present) {
    if (keys.has(key)) continue;
    present.delete(key);
    ended.unshift({ change, start, end: state.time_s });
    announce(`${changeName(change)} has ended`);
  }
  while (ended.length && ended[ended.length - 1].end < state.time_s - 300) ended.pop();
  spans = [...[...present.values()].map(({ start }) => [start, null]), ...ended.map(({ start, end }) => [start, end])];
  const items = [...present.values()].map(({ change }) => {
    const item = element("li");
    const programs = change.programs_left ? `, ${change.programs_left} programs left` : "";
    const estimate = change.estimated_s ? `, about ${Math.ceil(change.estimated_s)} s` : "";
    const layers = change.layers ? `, ${change.switched} of ${change.layers} layers` : "";
    item.append(element("span", `${changeName(change)}: ${change.state}${programs}${estimate}${layers}`));
    const bar = item.appendChild(element("progress"));
    bar.max = change.layers || 1;
    bar.value = change.switched;
    bar.setAttribute("aria-label", changeName(change));
    return item;
  });
  for (const { change, start, end } of ended.slice(0, MAX_ENDED)) {
    const item = element("li", "", "done");
    item.append(element("span", `${changeName(change)}: ended after ${(end - start).toFixed(1)} s`));
    items.push(item);
  }
  find("changes").replaceChildren(...items);
}

function announce(text) {
  find("announce").textContent = text;
}

// Merge and split

let controls = "";

function groups() {
  const all = state.devices.map(({ device }) => device);
  const found = [all];
  const largest = Math.max(...state.degrees.map(({ degree }) => degree));
  for (let size = Math.min(largest, all.length / 2); size > 1; size /= 2) {
    for (let first = 0; first < all.length; first += size) found.push(all.slice(first, first + size));
  }
  return found;
}

function renderControls() {
  const key = JSON.stringify([state.instances.map(({ devices }) => devices), state.degrees, state.changes.length > 0, find("scope").value]);
  if (key === controls) return;
  controls = key;
  const scope = find("scope");
  const options = groups();
  if (scope.options.length !== options.length) {
    scope.replaceChildren(...options.map((devices, index) => {
      const option = element("option", index ? `devices ${span(devices)}` : "all devices");
      option.value = index ? JSON.stringify(devices) : "";
      return option;
    }));
  }
  const chosen = options[scope.selectedIndex] ?? options[0];
  const degrees = state.instances.filter(({ devices }) => devices.some((it) => chosen.includes(it))).map(({ degree }) => degree);
  const focused = document.activeElement?.value;
  find("degrees").replaceChildren(...state.degrees.filter(({ degree }) => degree <= chosen.length).map(({ degree, missing_programs: missing }) => {
    const now = degrees.every((it) => it === degree);
    const name = now ? `TP${degree} now` : `${degrees.some((it) => it > degree) ? "Split" : "Merge"} to TP${degree}`;
    const button = element("button", name);
    button.value = degree;
    button.disabled = now || state.changes.length > 0;
    if (missing) button.title = `${missing} of its programs are still being compiled`;
    return button;
  }));
  if (focused) find("degrees").querySelector(`button[value="${CSS.escape(focused)}"]`)?.focus();
}

find("scope").addEventListener("change", renderControls);
find("transform").addEventListener("submit", async (event) => {
  event.preventDefault();
  const degree = Number(event.submitter?.value);
  if (!degree) return;
  const chosen = find("scope").value;
  const result = find("result");
  result.className = "";
  result.textContent = `${event.submitter.textContent}: requested`;
  try {
    const response = await fetch("cluster/transform", {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      body: JSON.stringify({ tensor_parallel_size: degree, devices: chosen ? JSON.parse(chosen) : [] }),
    });
    if (!response.ok) throw new Error(await errorText(response));
    const report = await response.json();
    result.textContent = `TP${report.tensor_parallel_size} after ${report.seconds.toFixed(2)} s; ${formatBytes(report.moved_bytes)} of KV cache moved`;
  } catch (error) {
    result.className = "warn";
    result.textContent = error instanceof TypeError ? "no connection" : error.message;
  }
});

// Decisions

let newest = 0;

function addDecisions(decisions) {
  const list = find("decisions");
  // A server that has started again counts from 1.
  if (decisions.length && decisions[decisions.length - 1].number < newest) {
    newest = 0;
    list.replaceChildren();
  }
  for (const decision of decisions) {
    if (decision.number <= newest) continue;
    newest = decision.number;
    const item = element("li", "", decision.is_start ? "start" : "");
    const time = element("time", new Date(decision.at_s * 1000).toLocaleTimeString("en-GB"), "dim");
    time.dateTime = new Date(decision.at_s * 1000).toISOString();
    const refused = decision.outcome !== "accepted";
    item.append(time, element("span", refused ? `${decision.what}: ${decision.outcome}` : decision.what, refused ? "warn" : ""));
    const reason = [decision.reason, decision.detail].filter(Boolean).join("; ");
    if (reason) item.append(element("span", reason, "reason"));
    list.prepend(item);
  }
  for (const kind of [".start", "li:not(.start)"]) {
    const items = list.querySelectorAll(kind);
    for (let index = MAX_DECISIONS; index < items.length; index += 1) items[index].remove();
  }
}

find("show-starts").addEventListener("change", (event) => find("decisions").classList.toggle("changes-only", !event.target.checked));
find("decisions").classList.add("changes-only");

setInterval(showAge, 1000);
follow();
