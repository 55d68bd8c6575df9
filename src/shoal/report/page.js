"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const TIP = document.getElementById("tip");
  const tone = (n) => `var(--t${n})`;

  // ---------------------------------------------------------------- elements and words

  function svg(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function html(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const tidy = (value, digits) => String(Number(value.toPrecision(digits)));

  function inBytes(value, digits) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (Math.abs(value) < 1000) return `${tidy(value, digits)} ${unit}`;
      value /= 1000;
    }
    return `${tidy(value, digits)} TB`;
  }

  // An epsilon is never rounded to less than it is.
  function roundedUp(value, digits) {
    const near = Number(value.toPrecision(digits));
    if (!(near < value)) return near;
    const [, power] = value.toExponential().split("e");
    return Number((near + 10 ** (Number(power) - digits + 1)).toPrecision(digits));
  }

  function say(value, format, digits = 4) {
    if (format === "epsilon") value = roundedUp(value, digits);
    if (format === "share") return `${tidy(100 * value, digits)}%`;
    if (format === "bytes") return inBytes(value, digits);
    if (format === "seconds") return `${tidy(value, digits)} s`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
    return size >= 1000 ? Number(value.toPrecision(Math.max(digits, 4))).toLocaleString("en") : tidy(value, digits);
  }

  // ---------------------------------------------------------------- scales

  function niceStep(span, count) {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 2.5, 5, 10].find((n) => n * power >= raw * 0.999);
  }

  function ticks(low, high, count, whole) {
    let step = niceStep(high - low, count);
    if (whole) step = Math.max(1, Math.round(step));
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  }

  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const n of decades > 2.5 ? [1] : decades > 1 ? [1, 3] : [1, 1.5, 2, 3, 5, 7])
        if (n * 10 ** power >= low * 0.999 && n * 10 ** power <= high * 1.001) found.push(n * 10 ** power);
    const most = 6, every = Math.ceil(found.length / most);
    return found.filter((_, place) => place % every === 0);
  }

  function scale(low, high, from, to, log) {
    if (log) {
      const a = Math.log(low), b = Math.log(high);
      return (value) => from + ((Math.log(value) - a) / (b - a || 1)) * (to - from);
    }
    return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  }

  function range(values, log, format) {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    if (format === "share") {
      const room = Math.max(0.02, (high - low) * 0.08);
      return [Math.max(0, low - room), Math.min(1, high + room)];
    }
    if (low >= 0 && low < 0.6 * high) low = 0;
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 1.4 * high)];
    const room = (high - low) * 0.07;
    return [low === 0 ? 0 : low - room, high + room];
  }

  // ---------------------------------------------------------------- parts of a plot

  function frame(width, height, right, left) {
    return { width, height, left, right: width - right, top: 14, bottom: height - 36 };
  }

  function axes(root, box, x, y, xs, ys, sayX, sayY, xLabel, yLabel) {
    for (const value of ys) {
      root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
      root.append(svg("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, sayY(value)));
    }
    for (const value of xs) {
      root.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4 }));
      root.append(svg("text", { x: x(value), y: box.bottom + 17, "text-anchor": "middle" }, sayX(value)));
    }
    root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    root.append(svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 31, "text-anchor": "middle" }, xLabel));
    if (yLabel) root.append(svg("text", { x: box.left - 34, y: 6 }, yLabel));
  }

  function levels(root, lines, y, box, beside) {
    for (const line of lines) {
      root.append(svg("line", { class: "level", x1: box.left, x2: box.right, y1: y(line.y), y2: y(line.y) }));
      root.append(svg("text", { class: "label", x: beside ? box.right + 9 : box.left + 6, y: y(line.y) + (beside ? 4 : -6) }, line.label));
    }
  }

  // Labels at the ends of lines, moved apart so that none hides another.
  function spread(labels, top, bottom) {
    labels.sort((a, b) => a.y - b.y);
    const gap = 15;
    for (let n = 1; n < labels.length; n++) labels[n].y = Math.max(labels[n].y, labels[n - 1].y + gap);
    const over = labels.length ? labels[labels.length - 1].y - bottom : 0;
    if (over > 0) for (const label of labels) label.y -= over;
    for (let n = labels.length - 2; n >= 0; n--) labels[n].y = Math.min(labels[n].y, labels[n + 1].y - gap);
    return labels;
  }

  function path(points) {
    return points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  }

  function legend(figure, entries) {
    const place = figure.querySelector(".legend");
    place.replaceChildren(...entries.map((entry) => html("span", { class: entry.kind || "", style: `--tone:${tone(entry.tone)}` }, entry.name)));
    place.hidden = entries.length === 0;
  }

  // ---------------------------------------------------------------- lines over rounds

  function lines(figure, plot, width) {
    const format = plot.format, narrow = width < 430, height = figure.closest(".wide") ? (narrow ? 280 : 360) : 232;
    const held = plot.series.flatMap((s) => s.values.filter((v) => v !== null));
    const level = plot.lines.map((l) => l.y).filter((v) => !plot.log || v > 0);
    const top = Math.max(...held), low = Math.min(...held);
    const near = level.filter((v) => v <= 3 * top && (low <= 0 || v >= low / 3 || !plot.log));
    const shown = [...held, ...near, ...plot.marks.map((m) => m.y)];
    const [y0, y1] = range(shown, plot.log, format);
    const many = plot.series.length > 1;
    const final = (s) => plot.marks.find((m) => !m.hollow && m.tone === s.tone)?.y ?? s.values.findLast((v) => v !== null);
    const named = many && !narrow && plot.series.every((s) => s.name.length < 20);
    const figure3 = (s) => plot.marks.find((m) => !m.hollow && m.tone === s.tone)?.text ?? say(final(s), format, 3);
    const words = plot.series.map((s) => (named ? `${s.name} ` : "") + figure3(s));
    const clients = plot.names.length > 0, longest = clients ? 11 : Math.max(...words.map((w) => w.length));
    const box = frame(width, height, Math.min(14 + longest * 6.4, width * 0.34), 46);
    const x = scale(plot.x[0], plot.x[plot.x.length - 1] + (plot.x.length === 1 ? 1 : 0), box.left + 4, box.right, false);
    const y = scale(y0, y1, box.bottom, box.top, plot.log);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": `${plot.title}. ${plot.about}` });
    const xs = plot.x.length === 1 ? [plot.x[0]] : ticks(plot.x[0], plot.x[plot.x.length - 1], narrow ? 4 : 6, true);
    const ys = plot.log ? logTicks(y0, y1) : ticks(y0, y1, 4);
    axes(root, box, x, y, xs, ys, (v) => v.toLocaleString("en"), (v) => say(v, format, 3), clients ? "clients, the worst first" : "round", "");
    levels(root, plot.lines.filter((line) => near.includes(line.y)), y, box, clients);
    if (clients) dots(root, plot, x, y, box);
    const ends = [];
    if (!clients) plot.series.forEach((s, n) => {
      const points = s.values.map((v, i) => [x(plot.x[i]), v === null ? NaN : y(v)]).filter((p) => Number.isFinite(p[1]));
      root.append(svg("path", { class: s.plain ? "line plain" : "line", style: `stroke:${tone(s.tone)}${plot.x.length > 400 ? ";stroke-width:1.1" : ""}`, d: path(points), "data-series": s.name }));
      const end = points[points.length - 1];
      if ((!s.plain && !plot.marks.some((m) => m.tone === s.tone)) || points.length === 1) root.append(svg("circle", { cx: end[0], cy: end[1], r: 3, style: `fill:${tone(s.tone)}` }));
      ends.push({ y: y(final(s)) + 4, text: words[n], tone: s.tone });
    });
    for (const mark of plot.marks) {
      const at = { cx: x(mark.x), cy: y(mark.y), r: 4.5, class: "mark-" + (mark.hollow ? "hollow" : "full") };
      at.style = mark.hollow ? `fill:var(--card);stroke:${tone(mark.tone)};stroke-width:1.8` : `fill:${tone(mark.tone)}`;
      root.append(svg("circle", at));
      const late = at.cx > (box.left + box.right) / 2;
      if (mark.hollow) root.append(svg("text", { class: "label", x: late ? at.cx - 9 : at.cx + 9, y: at.cy - 8, "text-anchor": late ? "end" : "start" }, `${mark.text} ${mark.label}`));
    }
    for (const end of spread(ends, box.top, box.bottom))
      root.append(svg("text", { class: "label", x: box.right + 9, y: end.y, style: `fill:${tone(end.tone)}` }, end.text));
    legend(figure, many && !named ? plot.series.map((s) => ({ name: s.name, tone: s.tone, kind: s.plain ? "plain" : "" })) : []);
    hoverLines(figure, plot, root, x, y, box);
    return root;
  }

  // One dot a client, as large as its records allow, above the names of the worst, which keep away from the others.
  function dots(root, plot, x, y, box) {
    const values = plot.series[0].values, most = Math.max(...plot.records), room = (box.right - box.left) / plot.x.length;
    const away = values[0] < values[values.length - 1] ? 12 : -6;
    const named = values.slice(0, Math.min(3, values.length - 1)).map((value, n) => ({ y: y(value) + away, n }));
    for (const { y: at, n } of spread(named, box.top, box.bottom - 5)) {
      const name = plot.names[n].length > 24 ? `${plot.names[n].slice(0, 23)}…` : plot.names[n];
      root.append(svg("text", { class: "label", x: x(plot.x[n]) + Math.min(12, 4 + 0.45 * room), y: at }, name));
    }
    values.forEach((value, n) => {
      const r = Math.max(Math.min(3, 1.2 + 0.2 * room), Math.min(9, 0.45 * room) * Math.sqrt(plot.records[n] / most));
      root.append(svg("circle", { class: "client", cx: x(plot.x[n]), cy: y(value), r, style: `fill:${tone(1)}` }));
    });
  }

  function hoverLines(figure, plot, root, x, y, box) {
    const cross = svg("g", { class: "hover", visibility: "hidden" });
    root.append(cross, svg("rect", { x: box.left, y: 0, width: Math.max(0, box.right - box.left + 12), height: box.bottom, fill: "transparent" }));
    let at = plot.x.length - 1;
    function show(place) {
      at = Math.max(0, Math.min(plot.x.length - 1, place));
      const px = x(plot.x[at]), rows = [html("b", {}, plot.names[at] ?? `round ${plot.x[at].toLocaleString("en")}`)];
      cross.replaceChildren(svg("line", { class: "cross", x1: px, x2: px, y1: box.top, y2: box.bottom }));
      for (const s of plot.series) {
        if (s.values[at] === null) continue;
        cross.append(svg("circle", { cx: px, cy: y(s.values[at]), r: 4, style: `fill:${tone(s.tone)}` }));
        rows.push(html("div", {}, html("span", {}, html("i", { style: `--tone:${tone(s.tone)}` }), s.name), html("span", {}, say(s.values[at], plot.format, 5))));
      }
      if (plot.names[at] !== undefined) rows.push(html("div", {}, html("span", {}, "held-out records"), html("span", {}, plot.records[at].toLocaleString("en"))));
      cross.setAttribute("visibility", "visible");
      tip(root, px, box.top, rows);
    }
    for (const name of ["pointermove", "pointerdown"]) root.addEventListener(name, (event) => {
      const px = ((event.clientX - root.getBoundingClientRect().left) / root.getBoundingClientRect().width) * root.viewBox.baseVal.width;
      let low = 0, high = plot.x.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (x(plot.x[middle]) < px) low = middle; else high = middle; }
      show(Math.abs(x(plot.x[low]) - px) < Math.abs(x(plot.x[high]) - px) ? low : high);
    });
    const hide = () => { cross.setAttribute("visibility", "hidden"); TIP.hidden = true; };
    leaving(root, hide);
    root.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: plot.x.length - 1 }[event.key];
      if (move === undefined) return event.key === "Escape" ? hide() : undefined;
      event.preventDefault();
      show(move);
    });
  }

  // A finger that is lifted leaves what it pointed at to be read; the next touch elsewhere takes it away.
  function leaving(element, hide) {
    element.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    element.addEventListener("blur", hide);
    document.addEventListener("pointerdown", (event) => { if (!element.contains(event.target) && element.isConnected) hide(); }, true);
  }

  function tip(root, px, py, rows) {
    TIP.replaceChildren(...rows);
    TIP.hidden = false;
    const around = root.getBoundingClientRect(), ratio = around.width / root.viewBox.baseVal.width;
    const left = around.left + px * ratio, room = document.documentElement.clientWidth;
    const beside = left + 14 + TIP.offsetWidth < room - 8 ? left + 14 : Math.max(8, left - 14 - TIP.offsetWidth);
    TIP.style.left = `${beside + scrollX}px`;
    TIP.style.top = `${around.top + scrollY + py * ratio}px`;
  }

  // ---------------------------------------------------------------- one point a run

  function points(figure, plot, width) {
    const narrow = width < 520, height = narrow ? 300 : 380;
    const proven = plot.points.filter((p) => p.x !== null), none = plot.points.filter((p) => p.x === null);
    const band = none.length ? Math.min(130, width * 0.22) : 0;
    const box = frame(width, height, 20 + band, 50);
    const xsHeld = proven.map((p) => p.x), log = proven.length > 0 && Math.max(...xsHeld) / Math.min(...xsHeld) > 4 && Math.min(...xsHeld) > 0;
    const [x0, x1] = proven.length ? (log ? [Math.min(...xsHeld) / 1.25, Math.max(...xsHeld) * 1.25] : range([0, ...xsHeld], false, "number")) : [0, 1];
    const level = plot.lines.map((l) => l.y), better = (a, b) => (plot.higher ? a > b : a < b);
    const [y0, y1] = range([...plot.points.map((p) => p.y), ...level], false, plot.format);
    const x = scale(x0, x1, box.left + 4, box.right, log), y = scale(y0, y1, box.bottom, box.top, false);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": `${plot.title}. ${plot.about}` });
    if (band) {
      root.append(svg("rect", { class: "band", x: box.right + 14, y: box.top - 6, width: band, height: box.bottom - box.top + 6, rx: 6 }));
      root.append(svg("text", { x: box.right + 14 + band / 2, y: box.bottom + 17, "text-anchor": "middle" }, "nothing proven"));
    }
    const xs = proven.length ? (log ? logTicks(x0, x1) : ticks(x0, x1, narrow ? 4 : 7)) : [];
    axes(root, box, x, y, xs, ticks(y0, y1, 5), (v) => say(v, "number", 3), (v) => say(v, plot.format, 3), "proven epsilon" + (log ? ", log scale" : ""), "");
    levels(root, plot.lines, y, box);
    // A model that is no better than a constant answer is shown, and is never the best.
    const ordered = proven.filter((p) => p.learnt).sort((a, b) => a.x - b.x || (better(a.y, b.y) ? -1 : 1));
    const best = ordered.reduce((kept, p) => (kept.length && !better(p.y, kept[kept.length - 1].y) ? kept : [...kept, p]), []);
    if (best.length > 1) {
      const steps = best.flatMap((p, n) => (n ? [[x(p.x), y(best[n - 1].y)], [x(p.x), y(p.y)]] : [[x(p.x), y(p.y)]]));
      root.append(svg("path", { class: "frontier", d: path(steps) }));
    }
    const groups = [...new Set(plot.points.map((p) => p.group))];
    const written = [];
    const colour = (group) => (groups.indexOf(group) % 6) + 1;
    plot.points.forEach((p, n) => {
      const cx = p.x === null ? box.right + 14 + band * (0.2 + (0.6 * (none.indexOf(p) + 0.5)) / none.length) : x(p.x);
      const dot = svg("circle", { class: "point", cx, cy: y(p.y), r: 6.5, style: p.learnt ? `fill:${tone(colour(p.group))}` : `fill:var(--card);stroke:${tone(colour(p.group))};stroke-width:2`, tabindex: "0", role: "img", "data-point": n, "aria-label": `${p.name}: ${plot.figure} ${say(p.y, plot.format)}${p.learnt ? "" : ", no better than a constant answer"}, ${p.x === null ? "nothing proven" : `epsilon ${say(p.x, "epsilon")}`}` });
      const show = () => {
        dot.classList.add("on");
        const rows = p.details.map(([key, value]) => html("div", {}, html("span", {}, key), html("span", {}, value)));
        tip(root, cx, y(p.y) + 6, [html("b", {}, p.name), ...rows]);
      };
      const hide = () => { dot.classList.remove("on"); TIP.hidden = true; };
      for (const name of ["pointerenter", "focus"]) dot.addEventListener(name, show);
      leaving(dot, hide);
      root.append(dot);
      if (narrow) return;
      // A label where there is room for it, on either side; the others show when pointed at.
      const long = p.label.length * 6.6 + 12, at = y(p.y);
      const free = (from) => from > box.left && from + long < width && written.every((w) => Math.abs(w.y - at) > 13 || from + long < w.from || from > w.to)
        && plot.points.every((o, m) => m === n || o.x === null !== (p.x === null) || Math.abs(y(o.y) - at) > 9 || x(o.x ?? x1) < from - 4 || x(o.x ?? x1) > from + long + 4);
      const from = [cx + 7, cx - 7 - long].find(free);
      if (from === undefined || p.x === null) return;
      written.push({ from, to: from + long, y: at });
      root.append(svg("text", { class: "label", x: from > cx ? from : from + long, y: at - 9, "text-anchor": from > cx ? "start" : "end" }, p.label));
    });
    legend(figure, groups.map((group) => ({ name: group, tone: colour(group), kind: "dot" })));
    return root;
  }

  // ---------------------------------------------------------------- tables

  function tableOf(plot) {
    const points = plot.points !== undefined, clients = !points && plot.names.length > 0;
    const names = points ? ["run", "proven epsilon", plot.figure] : [...(clients ? ["client", "held-out records"] : ["round"]), ...plot.series.map((s) => s.name)];
    const rows = points ? plot.points.map((p) => [p.name, p.x, p.y]) : plot.x.map((round, n) => [...(clients ? [plot.names[n], plot.records[n]] : [round]), ...plot.series.map((s) => s.values[n])]);
    const head = html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name))));
    const body = html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((v) => html("td", {}, v === null ? "" : String(v))))));
    const made = [html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${plot.title}: table` }, html("table", {}, head, body))];
    for (const extra of [...(plot.lines || []), ...(plot.marks || [])]) made.push(html("p", { class: "aside" }, `${extra.label}: ${extra.y}`));
    const kept = clients ? "clients: the worst, and others at even distances. All are in result.json." : "rounds: the first, the last, and the extremes of each stretch. All are in metrics.jsonl.";
    if (plot.of > rows.length) made.push(html("p", { class: "aside" }, `${rows.length.toLocaleString("en")} of ${plot.of.toLocaleString("en")} ${kept}`));
    return made;
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const key = (row, n) => { const cell = row.cells[n]; return cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent.trim(); };
    heads.forEach((head, n) => {
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...body.rows].sort((a, b) => {
          const left = key(a, n), right = key(b, n);
          if ((left === "") !== (right === "")) return left === "" ? 1 : -1;
          const order = typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true });
          return up ? order : -order;
        });
        body.append(...rows);
      });
    });
  }

  // ---------------------------------------------------------------- the page

  for (const plot of DATA.plots) {
    const figure = document.getElementById(plot.id), canvas = figure.querySelector(".canvas");
    const draw = plot.points !== undefined ? points : lines;
    let drawn = 0;
    const redraw = (width) => {
      if (width < 40 || Math.abs(width - drawn) < 1) return;
      drawn = width;
      TIP.hidden = true;
      canvas.replaceChildren(draw(figure, plot, width));
    };
    redraw(canvas.clientWidth);
    new ResizeObserver((entries) => redraw(entries[0].contentRect.width)).observe(canvas);
    const details = figure.querySelector("details.table");
    details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(...tableOf(plot)); });
  }
  document.querySelectorAll("table.sortable").forEach(sortable);

  const remember = (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a page from a file may have none */ } };
  const recall = (key) => { try { return sessionStorage.getItem(key); } catch { return null; } };
  const button = document.querySelector(".theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  if (recall("theme")) document.documentElement.dataset.theme = recall("theme");
  button.hidden = false;
  label();
  dark.addEventListener("change", label);
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember("theme", document.documentElement.dataset.theme);
    label();
  });
  addEventListener("beforeprint", () => document.querySelectorAll("section > details").forEach((each) => { each.open = true; }));

  // A run that goes on: look again, as long as nobody is pointing at something.
  if (document.body.hasAttribute("data-live")) {
    const open = JSON.parse(recall("open") || "[]");
    const all = [...document.querySelectorAll("details")];
    open.forEach((n) => { if (all[n]) all[n].open = true; });
    setInterval(() => {
      if (!TIP.hidden || document.hidden) return;
      remember("open", JSON.stringify(all.flatMap((each, n) => (each.open ? [n] : []))));
      location.reload();
    }, 3000);
  }
})();
