// The page: fetches the state of the cluster while it is visible, and shows it. A report has its data in the page.

const COLORS = ["--green", "--violet", "--blue", "--flame"].map((name) => `var(${name})`);
// The rows beyond which a table scrolls by itself.
const MANY = 16;
const ACTIVE_MS = 1000, SLOWEST_MS = 10000;
const by = (id) => document.getElementById(id);
const number = (n) => (n === null || n === undefined ? NaN : Number(n));

function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}:${two(s % 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)} h`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

function bytes(n) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

function tile(name, text) {
  const node = element(by("tiles"), "div", "tile");
  element(node, "span", "", name);
  element(node, "strong", "", text);
}

// A table in a card. A column is [title, class, cell], and a cell is a text or a function that fills its node.
const tableCards = new Map();
function table(title, columns, rows, options = {}) {
  let card = tableCards.get(title);
  if (!card) {
    card = element(by("tables"), "div", `card ${options.className || ""}`);
    element(card, "h2", "", title);
    card.body = element(card, "div", "");
    tableCards.set(title, card);
  }
  card.hidden = !rows.length && !options.note;
  const scrolled = card.body.firstChild ? card.body.firstChild.scrollTop : 0;
  card.body.replaceChildren();
  if (rows.length) {
    const scroll = element(card.body, "div", `scroll ${options.tall ? "tall" : ""}`);
    const node = element(scroll, "table");
    if (columns.some(([name]) => name)) {
      const head = element(element(node, "thead"), "tr");
      for (const [name, className] of columns) element(head, "th", className, name);
    }
    const body = element(node, "tbody");
    for (const row of rows) {
      const line = element(body, "tr");
      for (const [, className, cell] of columns) {
        const place = element(line, "td", className);
        const content = cell(row);
        if (typeof content === "function") content(place); else place.textContent = content;
      }
    }
    scroll.scrollTop = scrolled;
  }
  if (options.note) element(card.body, "p", "note", options.note);
}

function pill(place, text, kind) {
  element(place, "span", `pill ${kind}`, text);
}

const DOES = { training: "good", serving: "good", evaluating: "good", waiting: "wait", gone: "bad" };

function does(task) {
  return (place) => {
    if (task.trouble) return pill(place, "cannot work", "bad");
    // The names stay whole where a narrow screen breaks the line.
    const names = task.waiting_on.map((name) => name.replace("-", "\u2011")).join(", ");
    if (names) return pill(place, `waits for ${names}`, "wait");
    pill(place, task.activity, DOES[task.activity] || "");
  };
}

function lead(task, most) {
  return (place) => {
    const box = element(place, "span", "lead");
    const bar = element(element(box, "i"), "b");
    bar.style.width = `${most ? (100 * Math.min(task.lead, most)) / most : 0}%`;
    box.append(`+${task.lead}`);
  };
}

function showWorkers(status) {
  const workers = status.tasks.filter((task) => task.task && task.task.startsWith("worker"));
  const most = Math.max(status.staleness || 0, 1, ...workers.map((task) => task.lead));
  const bound = status.mode === "bounded" ? `Bounded: a worker may be ${status.staleness} steps ahead of the slowest.` : "";
  table("Workers", [
    ["worker", "", (t) => t.task],
    ["does", "", does],
    ["clock", "number", (t) => count(t.clock)],
    ["lead", "number", (t) => lead(t, most)],
    ["loss", "number wide", (t) => (t.clock ? value(number(t.loss)) : "")],
    ["samples/s", "number", (t) => (t.clock ? count(number(t.samples_per_second)) : "")],
    ["heartbeat", "number wide", (t) => `${number(t.heartbeat_age_seconds).toFixed(1)} s ago`],
  ], workers, { note: workers.length ? bound : "No worker has joined yet.", tall: workers.length > MANY });
}

// A mean over corrected steps; the servers of sync mode have none.
const mean = (n) => (n === null || n === undefined ? "" : value(number(n)));

function showServers(status) {
  const corrected = status.shards.some((s) => s.mean_step_factor != null);
  table("Parameter servers", [
    ["shard", "", (s) => `${s.shard}`],
    ["server", "", (s) => s.server || "none"],
    ["blocks", "number wide", (s) => count(s.blocks)],
    ["size", "number", (s) => bytes(s.bytes)],
    ["updates", "number", (s) => count(s.updates)],
    ["refused", "number wide", (s) => count(s.refused)],
    ["largest lead", "number", (s) => `${s.max_clock_lead}`],
    ["staleness", "number", (s) => value(number(s.mean_gradient_staleness))],
    ...(corrected ? [["step factor", "number", (s) => mean(s.mean_step_factor)], ["length × sync's", "number wide", (s) => mean(s.mean_synchronous_ratio)]] : []),
  ], status.shards, { tall: status.shards.length > MANY });
  table("Tables", [
    ["table", "", (t) => t.table],
    ["rows", "number", (t) => count(t.rows)],
    ["memory", "number", (t) => bytes(t.bytes)],
    ["created", "number wide", (t) => count(t.created)],
    ["evicted", "number wide", (t) => count(t.evicted)],
  ], status.tables);
}

function showRing(ring) {
  if (!ring) return;
  const broken = Object.entries(ring.broken).map(([cause, times]) => `${times} × ${cause}`);
  const age = ring.seconds === null ? "" : ` for ${span(number(ring.seconds))}`;
  const note = `Ring ${ring.number}: ${ring.stage}${age}, ${ring.members.length} of ${ring.wanted} workers`
    + (broken.length ? `; broken before: ${broken.join(", ")}` : "");
  const grouped = ring.members.some((m) => m.spare || m.place !== null);
  table("Ring", [
    ["rank", "", (m) => `${m.rank}`],
    ["worker", "", (m) => m.task || ""],
    ...(grouped ? [["place", "", (m) => m.spare ? "spare" : `${m.place ?? ""}`]] : []),
    ["state", "", (m) => (place) => m.waited_for_seconds === null
      ? pill(place, m.joined ? "in step" : "not joined", m.joined ? "good" : "")
      : pill(place, `waited for ${span(number(m.waited_for_seconds))}`, "wait")],
    ["steps", "number", (m) => count(m.steps)],
  ], ring.members, { note, tall: ring.members.length > MANY });
}

function showHistory(history) {
  const steps = history.steps, x = steps.steps.map(number);
  const curve = (values) => x.map((at, i) => [at, number(values[i])]);
  const names = [...new Set(history.evaluations.flatMap((e) => Object.keys(e.metrics)))].sort();
  const metric = (name) => history.evaluations.filter((e) => name in e.metrics).map((e) => [e.steps, number(e.metrics[name])]);
  const charts = by("charts");
  chart(charts, "loss", [
    { name: "training", color: "var(--blue)", points: curve(steps.loss) },
    { name: "test", color: "var(--flame)", points: metric("loss") },
  ], "steps");
  names.filter((name) => name !== "loss").forEach((name, i) => {
    chart(charts, name, [{ name: "test", color: COLORS[i % COLORS.length], points: metric(name) }], "steps");
  });
  chart(charts, "samples/s", [{ name: "all workers", color: "var(--blue)", points: curve(steps.samples_per_second) }], "steps");
  return { loss: number(steps.loss.at(-1)), rate: number(steps.samples_per_second.at(-1)), last: history.evaluations.at(-1) };
}

function showRecords(history, note) {
  table("Checkpoints", [
    ["number", "", (c) => `${c.number}`],
    ["step", "number", (c) => count(c.steps)],
    ["after", "number", (c) => span(number(c.seconds))],
  ], [...history.checkpoints].reverse(), { className: "third", tall: true, note });
  table("Events", [
    ["at", "narrow", (r) => r.time ? new Date(1000 * r.time).toLocaleTimeString() : ""],
    ["after", "narrow", (r) => number(r.seconds) > 0 ? span(number(r.seconds)) : ""],
    ["event", "", (r) => r.text],
  ], [...history.remarks].reverse(), { className: "third", tall: true });
}

function showTroubles(texts, waits) {
  by("troubles").replaceChildren();
  for (const text of texts) if (text) element(by("troubles"), "p", "card bad", text);
  if (waits) element(by("troubles"), "p", "card wait", waits);
}

function showSettings(text) {
  by("settings").hidden = false;
  if (by("toml").textContent !== text) by("toml").textContent = text;
}

const PHASES = { training: "good", done: "good", failed: "bad", starting: "wait" };

function head(job, place, phase) {
  document.title = `${job} · Flambeau`;
  by("job").textContent = job;
  by("place").textContent = place;
  by("phase").hidden = false;
  by("phase").className = `pill ${PHASES[phase] || ""}`;
  by("phase").textContent = phase;
}

// The samples of each of the last answers, for the time that is left.
const pace = [];
function timeLeft(status) {
  const now = { at: number(status.seconds), samples: status.samples };
  if (pace.length && pace[pace.length - 1].samples > now.samples) pace.length = 0;
  pace.push(now);
  while (pace.length > 30) pace.shift();
  const rate = (now.samples - pace[0].samples) / (now.at - pace[0].at);
  const seconds = (status.total_samples - now.samples) / rate;
  return status.phase === "training" && Number.isFinite(seconds) ? ` · ${span(seconds)} left` : "";
}

function showLive(state) {
  const { status, history } = state;
  const way = status.ring ? status.strategy : status.mode;
  head(status.job, `${way} · ${state.run_dir}`, status.phase);
  const troubles = status.tasks.filter((task) => task.trouble).map((task) => `${task.task} cannot work: ${task.trouble}`);
  const broken = status.shards.filter((s) => s.non_finite).map((s) => `Shard ${s.shard} has values of ${s.non_finite} that are NaN or infinite.`);
  showTroubles([status.error, status.checkpoint_error, status.loss_warning, ...troubles, ...broken], status.waiting_for);
  by("progress").hidden = !status.total_samples;
  by("done").style.width = `${(100 * status.samples) / Math.max(1, status.total_samples)}%`;
  const epoch = Math.min(status.data_epoch + 1, status.data_epochs);
  by("left").textContent = `epoch ${epoch} of ${status.data_epochs} · ${count(status.samples)} of ${count(status.total_samples)} samples${timeLeft(status)}`;
  const newest = showHistory(history);
  by("tiles").replaceChildren();
  if (history.steps.loss.length) tile("training loss", value(newest.loss));
  if (newest.last) for (const [name, mean] of Object.entries(newest.last.metrics)) tile(`test ${name}`, value(number(mean)));
  tile("samples/s", count(newest.rate));
  tile("steps", count(status.steps));
  if (number(status.learning_rate_factor) < 1) tile("learning rate ×", value(number(status.learning_rate_factor)));
  tile("time", span(number(status.seconds)));
  if (status.checkpoint) tile("checkpoint age", span(number(status.checkpoint.age_seconds)));
  showWorkers(status);
  showServers(status);
  showRing(status.ring);
  showRecords(history, status.lost_updates ? `${count(status.lost_updates)} updates are lost with servers.` : "");
  showSettings(state.settings);
  by("foot").textContent = `Flambeau ${state.version} · run ${status.run} · view ${status.view}, shard map ${status.epoch}`;
}

function showReport(report) {
  const { summary, history } = report;
  head(report.job, `${summary.mode} · ${report.run_dir}`, summary.error ? "failed" : summary.stopped ? "stopped" : "done");
  showTroubles([summary.error, summary.unsaved && `The last checkpoint could not be written: ${summary.unsaved}`, summary.loss_warning]);
  showHistory(history);
  for (const [name, mean] of Object.entries(summary.metrics)) tile(`test ${name}`, value(number(mean)));
  tile("samples/s", count(number(summary.samples_per_second)));
  tile("steps", count(summary.steps));
  tile("time", span(number(summary.seconds)));
  const share = (name) => (name in summary ? `${(100 * number(summary[name])).toFixed(1)} %` : "");
  const rows = [
    ["mode", (summary.staleness === null ? summary.mode : `${summary.mode}, staleness at most ${summary.staleness}`) + (summary.pipeline ? `, pipeline ${summary.pipeline}` : "")],
    ["cluster", summary.ps ? `${summary.ps} servers, ${summary.workers} workers` : `${summary.workers} workers`],
    ["epochs", summary.job_epochs > summary.epochs ? `${count(summary.epochs)} of ${count(summary.job_epochs)}` : count(summary.epochs)],
    ["ended early", summary.stopped_early || (summary.stopped ? "it was told to" : "")],
    ["samples", count(summary.samples)],
    ["largest clock lead", `${summary.max_clock_lead} steps`],
    ["mean gradient staleness", `${value(number(summary.mean_gradient_staleness))} updates`],
    ["mean factor of steps", mean(summary.mean_step_factor)],
    ["mean length of steps, relative to sync mode", mean(summary.mean_synchronous_ratio)],
    ["updates of blocks lost", count(summary.lost_updates)],
    ["steps left out (not finite)", count(summary.skipped_steps)],
    ["gradients left out (late)", count(summary.late_steps)],
    ["time to compute", share("share_compute")],
    ["time to pull", share("share_pull")],
    ["time to push", share("share_push")],
    ["time to wait", share("share_wait")],
    ["SHA-256 of the model", summary.model_sha256],
  ];
  table("Summary", [["", "name", (r) => r[0]], ["", "", (r) => r[1]]], rows.filter((row) => row[1]));
  showRecords(history, "");
  showSettings(report.settings);
  by("foot").textContent = `Flambeau ${report.version} · written ${new Date(1000 * report.written).toLocaleString()}`;
}

const KEPT = "flambeau token";
let token = sessionStorageItem();
let timer = null, asking = false, pause = ACTIVE_MS, answered = 0, phase = "";
// The run that is shown.
let run = "";

function sessionStorageItem() {
  // A token after # in the address does not reach any server, and does not stay in the address.
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) history.replaceState(null, "", location.pathname + location.search);
  try { return given || sessionStorage.getItem(KEPT) || ""; } catch { return given || ""; }
}

function askForToken(wrong) {
  by("ask").hidden = false;
  by("wrong").hidden = !wrong;
  by("token").focus();
}

async function poll() {
  timer = null;
  if (document.visibilityState !== "visible" || asking) return;
  asking = true;
  try {
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(SLOWEST_MS) });
    if (answer.status === 401) {
      askForToken(token !== "");
      return;
    }
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    const state = await answer.json();
    answered = Date.now();
    pause = ACTIVE_MS;
    by("ask").hidden = by("silent").hidden = true;
    try { sessionStorage.setItem(KEPT, token); } catch { /* the browser keeps nothing */ }
    if (state.status) {
      // Nothing of the job before stays.
      if (run && run !== state.status.run) return location.reload();
      run = state.status.run;
      phase = state.status.phase;
      showLive(state);
    } else {
      by("silent").hidden = false;
      by("silent").textContent = "The cluster has no job at present.";
    }
  } catch (error) {
    pause = Math.min(SLOWEST_MS, 1.5 * pause);
    by("silent").hidden = false;
    const ended = phase === "done" || phase === "failed";
    by("silent").className = `card ${ended ? "wait" : "bad"}`;
    by("silent").textContent = ended
      ? "The job has ended, and its coordinator with it. The run directory has the results."
      : answered
      ? `The coordinator does not answer any more. It ends with its job; the run directory then has the results. This is its state of ${new Date(answered).toLocaleTimeString()}.`
      : `The coordinator does not answer: ${error.message}.`;
  } finally {
    asking = false;
  }
  // A page that is not visible asks nothing.
  if (document.visibilityState === "visible" && timer === null) timer = setTimeout(poll, pause);
}

function begin() {
  const data = JSON.parse(by("data").textContent);
  if (data) return showReport(data);
  by("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = by("token").value.trim();
    poll();
  });
  document.addEventListener("visibilitychange", () => { if (timer === null && by("ask").hidden) poll(); });
  if (document.body.dataset.token === "required" && !token) askForToken(false);
  else poll();
}

begin();
