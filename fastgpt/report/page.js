"use strict";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

// --- what the pointer shows ---
const tip = document.getElementById("tip");
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
const percent = (p) => (p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");
function element(name, className, ...inside) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...inside);
  return made;
}
function add_row(table, ...cells) {
  table.append(element("tr", "", ...cells.map((cell) => element("td", "", cell))));
}
function show_tip(left, top, ...inside) {
  tip.replaceChildren(...inside);
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(left, innerWidth - tip.offsetWidth - 24)) + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

// --- curves: their x axis, log scale and colours; the values of all at the pointer ---
const form = document.querySelector(".switches");
const models = (type) => [...(Bokeh.documents[0]?.all_models ?? [])].filter((model) => model.type === type);
const is_log = (figure) => figure.classList.contains("log");
let unit = ["step", 1];
function draw() {
  const axis = form.elements.axis.value;
  const longest = Math.max(...models("ColumnDataSource").map((source) => source.data[axis].at(-1)));
  unit = [axis, 1];
  if (axis === "seconds" && longest > 120) unit = longest > 7200 ? ["hours", 3600] : ["minutes", 60];
  for (const source of models("ColumnDataSource"))
    source.data = { ...source.data, x: Array.from(source.data[axis], (x) => x / unit[1]) };
  const range = { start: 0, end: (1.01 * longest) / unit[1] };
  for (const figure of models("Figure")) {
    figure.below[0].axis_label = unit[0];
    figure.x_range.setv({ ...range, reset_start: range.start, reset_end: range.end });
  }
  choose_scale();
  fit();
}
function fit() { // each y axis to the points between the ends of the x axis
  for (const figure of models("Figure")) {
    const { start, end } = figure.x_range;
    const seen = sources_of(figure).flatMap(({ data: { x, y } }) => Array.from(y).filter((_, i) => x[i] >= start && x[i] <= end));
    const [low, high, log] = [Math.min(...seen), Math.max(...seen), figure.left[0].type === "LogAxis"];
    if (!(high > low)) continue;
    const margin = log ? (high / low) ** 0.05 : 0.05 * (high - low);
    figure.y_range.setv(log ? { start: low / margin, end: high * margin } : { start: low - margin, end: high + margin });
  }
}
function choose_scale() {
  for (const figure of all(".figures figure")) figure.hidden = is_log(figure) !== form.elements.log.checked;
}
const sources_of = (figure) => figure.renderers.map((renderer) => renderer.data_source);
function show_values(figure, x, left, top) {
  const [table, shown] = [element("table", ""), new Set()];
  const number = (value) => value.toLocaleString("en");
  let step, head;
  const several = document.querySelector(".run"); // of one run the values of all figures are shown
  for (const source of several ? sources_of(figure) : models("Figure").flatMap(sources_of)) {
    if (shown.has(source)) continue;
    shown.add(source);
    const xs = source.data.x;
    let i = xs.findIndex((value) => value >= x);
    if (i < 0 || (i > 0 && x - xs[i - 1] < xs[i] - x)) i = i < 0 ? xs.length - 1 : i - 1;
    const at = source.data.step[i];
    step ??= at;
    head ??= `step ${number(at)}, ${number(source.data.tokens[i])} tokens`;
    const name = element("span", "", element("i", "dot"), source.name);
    name.firstChild.style.background = source.tags[0];
    const y = source.data.y[i];
    const said = source.name.endsWith("MFU") ? percent(y) : (+y.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
    add_row(table, name, said, at === step ? "" : `step ${number(at)}`);
  }
  show_tip(left + 18, top + 12, element("b", "", head), table);
}
if (form) {
  form.addEventListener("change", draw);
  choose_scale();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const type of ["Figure", "LinearAxis", "LogAxis", "Grid"]) for (const model of models(type)) model.change.emit();
  });
  for (const kind of ["pointerup", "wheel"]) addEventListener(kind, () => setTimeout(fit, 100), true); // zoomed or moved
  let pointer;
  for (const figure of all(".figures figure")) {
    figure.addEventListener("pointermove", (event) => {
      if (!pointer) // the first time: Bokeh has its document only some time after the page has loaded
        for (const model of models("Figure")) model.on_event("mousemove", ({ x }) => show_values(model, x, ...pointer));
      pointer = [event.clientX, event.clientY];
    }, true);
    figure.addEventListener("pointerleave", () => (tip.hidden = true));
    figure.addEventListener("dblclick", draw);
  }
}

// --- samples: one at a time ---
for (const section of all(".samples")) {
  const [slider, figures] = [section.querySelector("input"), all("figure", section)];
  const show = () => figures.forEach((figure, i) => (figure.hidden = i !== +slider.value));
  slider.addEventListener("input", show);
  show();
}

// --- tokens: what was likely in the place of each, and which were hard ---
for (const section of all(".tokens")) {
  const tokens = JSON.parse(section.querySelector("script").textContent);
  const [text, spans] = [section.querySelector(".text"), all(".text span", section)];
  let at = -1;
  const leave = () => {
    tip.hidden = true;
    spans[at]?.classList.remove("on");
  };
  const show = (i) => {
    leave();
    at = i;
    const [token, loss, likeliest] = tokens[i];
    const table = element("table", "");
    for (const [other, p] of likeliest) {
      const bar = element("span", "bar");
      bar.style.width = `${Math.round(80 * p) + 1}px`;
      add_row(table, element(other === token ? "b" : "span", "", visible(other)), percent(p), bar);
    }
    const box = spans[i].getClientRects()[0];
    const said = ` ${percent(Math.exp(-loss))}, loss ${loss.toFixed(2)}`;
    show_tip(box.left, box.bottom + 6, element("b", "", visible(token)), said, table);
    spans[i].classList.add("on");
  };
  for (const kind of ["pointerover", "click"]) // a finger does not hover
    text.addEventListener(kind, (event) => {
      const i = spans.indexOf(event.target);
      i >= 0 ? show(i) : leave();
    });
  text.addEventListener("pointerleave", leave);
  text.addEventListener("blur", leave);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const next = at + { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (spans[next]) show(next);
  });

  const hardest = [...tokens.keys()].sort((a, b) => tokens[b][1] - tokens[a][1]).slice(0, 10);
  for (const i of hardest) {
    const [token, loss, [[likeliest, p]]] = tokens[i];
    const before = tokens.slice(Math.max(0, i - 24), i).map(([text]) => text).join("").slice(-24);
    const place = element("code", "", visible(before).replaceAll("␣", " "), element("span", "hard", visible(token)));
    add_row(section.querySelector(".hardest"), place, loss.toFixed(2), element("code", "", `${visible(likeliest)} ${percent(p)}`));
  }
  const losses = {};
  for (const [token, loss] of tokens) (losses[token] ??= []).push(loss);
  const mean = (values) => values.reduce((a, b) => a + b) / values.length;
  const often = Object.entries(losses).filter(([, x]) => x.length >= 3);
  for (const [token, x] of often.sort(([, a], [, b]) => mean(b) - mean(a)).slice(0, 10))
    add_row(section.querySelector(".often"), element("code", "", visible(token)), x.length, mean(x).toFixed(2));
}
