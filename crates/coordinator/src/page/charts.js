"use strict";
// Small charts as SVG, without any library.

const SVG = "http://www.w3.org/2000/svg";

function svg(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function element(parent, name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

// Numbers as people read them: 12,345 or 1.5M, and four digits behind the point at most.
function count(n) {
  if (!Number.isFinite(n)) return "–";
  if (Math.abs(n) >= 1e9) return (n / 1e9).toFixed(2) + "G";
  if (Math.abs(n) >= 1e7) return (n / 1e6).toFixed(1) + "M";
  return Math.round(n).toLocaleString("en");
}

function value(n) {
  if (Number.isNaN(n)) return "NaN";
  if (!Number.isFinite(n)) return n > 0 ? "∞" : "−∞";
  const size = Math.abs(n);
  if (size >= 1000) return count(n);
  if (size > 0 && size < 0.001) return n.toExponential(2);
  return size >= 100 ? n.toFixed(1) : n.toFixed(4);
}

function tickText(n, step) {
  const size = Math.abs(n);
  if (size >= 1e9) return +(n / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return +(n / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return +(n / 1e3).toFixed(2) + "k";
  if (step < 1e-6) return n.toExponential(1);
  const digits = (String(+step.toPrecision(4)).split(".")[1] || "").length;
  return n.toFixed(digits);
}

// Round values between two ends.
function ticks(low, high, most) {
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw) || raw;
  const all = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) all.push(i * step);
  return { all, step };
}

function range(numbers, margin) {
  let low = Infinity, high = -Infinity;
  for (const n of numbers) if (Number.isFinite(n)) { low = Math.min(low, n); high = Math.max(high, n); }
  if (low > high) return [0, 1];
  const extra = (high - low) * margin || Math.abs(high) * 0.05 || 0.5;
  return margin ? [low - extra, high + extra] : [low, high > low ? high : low + 1];
}

// Powers of ten between two logarithms, with the logarithms as places.
function powers(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const all = [];
  for (let n = Math.ceil(low / every) * every; n <= high; n += every) all.push(n);
  return all.length > 1 ? all.map((n) => [n, `1e${n}`]) : null;
}

const EDGES = { left: 50, right: 10, top: 8, bottom: 24 };

// Draws a chart into its card. Each series has a name, a colour, and points [x, y].
function draw(card, series, unit) {
  const plot = card.plot;
  const width = plot.clientWidth || 360, height = plot.clientHeight || 210;
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren();
  const [x0, x1] = range(series.flatMap((s) => s.points.map((p) => p[0])), 0);
  const shown = (n) => (card.log ? Math.log10(n) : n);
  const [y0, y1] = range(series.flatMap((s) => s.points.map((p) => shown(p[1]))), 0.06);
  const x = (n) => EDGES.left + ((n - x0) / (x1 - x0)) * (width - EDGES.left - EDGES.right);
  const place = (n) => EDGES.top + (1 - (n - y0) / (y1 - y0)) * (height - EDGES.top - EDGES.bottom);
  const y = (n) => place(shown(n));
  const floor = height - EDGES.bottom;
  const even = ticks(y0, y1, 5);
  const text = (n) => (card.log ? (10 ** n).toPrecision(2) : tickText(n, even.step));
  const rows = (card.log && powers(y0, y1)) || even.all.map((n) => [n, text(n)]);
  for (const [n, label] of rows) {
    svg(plot, "line", { class: "grid", x1: EDGES.left, x2: width - EDGES.right, y1: place(n), y2: place(n) });
    svg(plot, "text", { x: EDGES.left - 8, y: place(n) + 4, "text-anchor": "end" }, label);
  }
  svg(plot, "line", { class: "axis", x1: EDGES.left, x2: width - EDGES.right, y1: floor, y2: floor });
  const columns = ticks(x0, x1, Math.max(2, Math.floor(width / 60)));
  for (const n of columns.all) {
    if (x(n) > width - EDGES.right - 34) continue;
    svg(plot, "text", { x: x(n), y: height - 7, "text-anchor": "middle" }, tickText(n, columns.step));
  }
  svg(plot, "text", { x: width - EDGES.right, y: height - 7, "text-anchor": "end" }, unit);
  for (const s of series) {
    let path = "", pen = "M";
    for (const [px, py] of s.points) {
      // A value that is NaN or infinite leaves a gap, and on a logarithmic axis one below 0.
      if (!Number.isFinite(shown(py))) { pen = "M"; continue; }
      path += `${pen}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
      pen = "L";
    }
    svg(plot, "path", { d: path || "M0 0", fill: "none", stroke: s.color, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" });
    const finite = s.points.filter((p) => Number.isFinite(shown(p[1])));
    if (finite.length <= 40) for (const [px, py] of finite) svg(plot, "circle", { cx: x(px), cy: y(py), r: 2.6, fill: s.color });
  }
  card.scale = { x, y, series, unit, width, height };
  if (card.pointer !== undefined) point(card, card.pointer);
}

function nearest(points, target, x) {
  let best = null;
  for (const p of points) if (!best || Math.abs(x(p[0]) - target) < Math.abs(x(best[0]) - target)) best = p;
  return best;
}

// Shows the values at a place of a chart.
function point(card, place) {
  unpoint(card);
  card.pointer = place;
  const { x, y, series, unit, width, height } = card.scale;
  const all = series.flatMap((s) => s.points);
  const at = nearest(all, place, x);
  if (!at) return;
  const left = x(at[0]);
  card.marks = [svg(card.plot, "line", { class: "at", x1: left, x2: left, y1: EDGES.top, y2: height - EDGES.bottom })];
  card.tip = element(card, "div", "tip");
  element(card.tip, "div", "", `${unit === "steps" ? "step" : unit} ${count(at[0])}`);
  for (const s of series) {
    const p = nearest(s.points, left, x);
    if (!p) continue;
    const row = element(card.tip, "div", "key");
    element(row, "i").style.background = s.color;
    row.append(`${s.name} ${value(p[1])}`);
    if (Number.isFinite(y(p[1]))) card.marks.push(svg(card.plot, "circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: s.color }));
  }
  const [outer, inner] = [card.getBoundingClientRect(), card.plot.getBoundingClientRect()];
  const offset = inner.left - outer.left;
  const room = left + 12 + card.tip.offsetWidth < width;
  card.tip.style.left = `${offset + (room ? left + 12 : Math.max(0, left - 12 - card.tip.offsetWidth))}px`;
  card.tip.style.top = `${inner.top - outer.top + EDGES.top}px`;
}

function unpoint(card) {
  card.pointer = undefined;
  if (card.tip) card.tip.remove();
  for (const mark of card.marks || []) mark.remove();
  card.tip = card.marks = null;
}

const cards = new Map();

// Shows a chart under a title; makes its card if there is none yet.
function chart(parent, title, series, unit) {
  series = series.filter((s) => s.points.length);
  if (!series.length) return;
  let card = cards.get(title);
  if (!card) {
    card = element(parent, "div", "card");
    card.head = element(card, "div", "head");
    card.plot = svg(card, "svg", { class: "plot", role: "img", "aria-label": title });
    card.plot.addEventListener("pointermove", (event) => point(card, event.clientX - card.plot.getBoundingClientRect().left));
    card.plot.addEventListener("pointerleave", () => unpoint(card));
    cards.set(title, card);
  }
  card.head.replaceChildren();
  element(card.head, "h2", "", title);
  for (const s of series) {
    const key = element(card.head, "span", "key");
    element(key, "i").style.background = s.color;
    key.append(s.name);
  }
  const toggle = element(card.head, "button", "log", card.log ? "log" : "linear");
  toggle.title = "linear or logarithmic axis";
  toggle.addEventListener("click", () => {
    card.log = !card.log;
    chart(parent, title, series, unit);
  });
  const pointer = card.pointer;
  card.again = () => draw(card, series, unit);
  unpoint(card);
  card.pointer = pointer;
  card.again();
}

window.addEventListener("resize", () => cards.forEach((card) => card.again()));
