"use strict";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

// --- curves: their x axis and log scale; the values at the pointer ---
const form = document.querySelector(".switches");
const tip = document.getElementById("tip");
const models = (type) => [...(Bokeh.documents[0]?.all_models ?? [])].filter((model) => model.type === type);
function choose_scale() {
  for (const figure of all(".figures figure")) figure.hidden = figure.classList.contains("log") !== form.elements.log.checked;
}
function draw() {
  const axis = form.elements.axis.value;
  for (const source of models("ColumnDataSource")) source.data = { ...source.data, x: source.data[axis] };
  for (const figure of models("Figure")) {
    figure.below[0].axis_label = axis;
    figure.reset.emit();
  }
  choose_scale();
}
function show_values(figure, x) {
  const lines = new Map();
  const several = document.querySelector(".run"); // of one run the values of all figures are shown
  for (const { renderers } of several ? [figure] : models("Figure"))
    for (const { name, tags: [column], data_source: { data } } of renderers) {
      const i = data.x.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(data.x[best] - x) ? i : best), 0);
      const value = data[column][i].toLocaleString("en", { maximumSignificantDigits: 4 });
      lines.set(name, `${value}  ${name} (step ${data.step[i]}, ${data.tokens[i].toLocaleString("en")} tokens)`);
    }
  tip.textContent = [...lines.values()].join("\n");
  tip.hidden = false;
}
if (form) {
  form.addEventListener("change", draw);
  choose_scale();
  let ready = false;
  for (const figure of all(".figures figure")) {
    figure.addEventListener("pointerenter", () => {
      if (!ready) for (const model of models("Figure")) { // none before Bokeh has loaded its document
        ready = true;
        model.on_event("mousemove", ({ x }) => show_values(model, x));
      }
    });
    figure.addEventListener("pointerleave", () => (tip.hidden = true));
  }
}

// --- samples: one at a time ---
for (const section of all(".samples")) {
  const [slider, figures] = [section.querySelector("input"), all("figure", section)];
  const show = () => figures.forEach((figure, i) => (figure.hidden = i !== +slider.value));
  slider.addEventListener("input", show);
  show();
}
