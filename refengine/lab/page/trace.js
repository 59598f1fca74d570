"use strict";
// Steps through a traced block: one number, the step, and everything on the page follows from it.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const number = (n) => (n ? n.toLocaleString("en-US") : "");
let step = 0;

function made(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

// --- What does not change -------------------------------------------------------------------------------------------

const lines = new Map(); // "function:line" -> its row

function drawSource() {
  const kept = data.counters.map((_, i) => i).filter((i) => data.functions.some((f) => Object.values(f.counts).some((c) => c[i])));
  data.functions.forEach((one, index) => {
    const names = ["line", ...kept.map((i) => data.counters[i].replace("_", " ")), "source"];
    const head = made("tr", {}, ...names.map((name) => made("th", { scope: "col" }, name)));
    const body = made("tbody");
    one.lines.forEach((text, offset) => {
      const line = one.first + offset;
      const counts = one.counts[line] || [];
      const cells = kept.map((i) => made("td", { class: "n" }, number(counts[i])));
      const row = made("tr", {}, made("td", { class: "n" }, String(line)), ...cells, made("td", { style: hanging(text) }, text));
      lines.set(`${index}:${line}`, row);
      body.append(row);
    });
    find("code").append(made("h3", {}, one.name, " ", made("small", {}, one.file)), made("table", {}, made("thead", {}, head), body));
  });
}

// Where a line of the source is too long for its column, the rest stands 4 further in.
function hanging(text) {
  const indent = text.search(/\S|$/) + 4;
  return `padding-left: calc(6px + ${indent}ch); text-indent: -${indent}ch`;
}

function drawTimeline() {
  let row = null, turn = null, looped = false;
  data.steps.forEach((one, index) => {
    looped ||= one.turns !== "";
    const now = one.turns.split(" · ")[0] || (looped ? "end" : "start");
    if (now !== turn) {
      row = made("div");
      find("timeline").append(made("div", { class: "turn" }, made("span", {}, now), row));
      turn = now;
    }
    const look = one.second ? `${one.look} twice` : one.look;
    const button = made("button", { class: look, title: title(index), "aria-label": title(index), tabindex: "-1" });
    button.addEventListener("click", () => go(index));
    row.append(button);
  });
}

function title(index) {
  const one = data.steps[index];
  const at = data.functions[one.at[0]];
  const text = at.lines[one.at[1] - at.first].trim().replace(/\($/, "(…)");
  return `step ${index + 1} of ${data.steps.length}: ${one.place ? one.place + ", " : ""}line ${one.at[1]}: ${text}`;
}

// --- What a step shows ----------------------------------------------------------------------------------------------

function go(wanted) {
  if (!data.steps.length) return;
  step = Math.min(Math.max(wanted, 0), data.steps.length - 1);
  const one = data.steps[step];
  find("status").textContent = title(step);
  find("slider").value = String(step);
  find("first").disabled = find("back").disabled = step === 0;
  find("next").disabled = find("last").disabled = step === data.steps.length - 1;
  document.querySelectorAll("#timeline button").forEach((b, i) => {
    if (i === step) b.setAttribute("aria-current", "step");
    else b.removeAttribute("aria-current");
  });
  document.querySelector("#timeline [aria-current]").scrollIntoView({ block: "nearest" });
  showLines(one);
  showMemory(one);
  showRows(one);
  history.replaceState(null, "", `#step=${step + 1}`);
}

function showLines(one) {
  lines.forEach((row) => row.classList.remove("on", "here"));
  for (const op of one.ops) for (const [at, line] of data.paths[op[2]]) lines.get(`${at}:${line}`).classList.add("on");
  const here = lines.get(one.at.join(":"));
  here.classList.add("here");
  const box = find("code"), top = here.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (top < 0 || top > box.clientHeight - 40) box.scrollTop += top - box.clientHeight / 3;
}

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function showMemory(one) {
  const rects = one.lit.map(([x, y, width, height, look]) => shape("rect", { x, y, width, height, class: look }));
  const labels = one.labels.map(([x, y, text, look]) => shape("text", { x, y, class: look }, text));
  find("lit").replaceChildren(...rects, ...labels);
  const told = one.lookups.map(([entry, page, times, who, where], n) =>
    `lookup ${n + 1}: entry ${entry} → page ${page}, ${who}, ${where}`);
  const counted = one.ops.filter(([kind, array]) => kind === "count" && array === "lookups").reduce((sum, op) => sum + op[6], 0);
  find("lookups").textContent = told.join("; ") || (counted ? `${number(counted)} page lookups by threads` : "no page lookup in this step");
}

function showRows(one) {
  find("rows").replaceChildren(...one.ops.map(([kind, array, path, turns, ...counts]) => {
    const where = data.paths[path].map(([at, line]) => `${data.functions[at].name}:${line}`);
    const line = made("td", { title: where.join(" → ") }, where[where.length - 1]);
    const cells = [kind, array].map((text) => made("td", {}, text));
    return made("tr", {}, ...cells, line, made("td", {}, turns), ...counts.map((n) => made("td", { class: "n" }, number(n))));
  }));
}

// --- Keys and buttons -----------------------------------------------------------------------------------------------

const moves = {
  ArrowRight: () => step + 1, j: () => step + 1, ArrowLeft: () => step - 1, k: () => step - 1,
  Home: () => 0, End: () => data.steps.length - 1, n: nextSecond,
};

// The next step that looks a second page up; after the last one, the first.
function nextSecond() {
  const found = data.steps.flatMap((one, index) => (one.second ? [index] : []));
  return found.find((index) => index > step) ?? found[0] ?? step;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
  event.preventDefault();
  go(moves[event.key]());
});
find("first").addEventListener("click", () => go(0));
find("back").addEventListener("click", () => go(step - 1));
find("next").addEventListener("click", () => go(step + 1));
find("last").addEventListener("click", () => go(data.steps.length - 1));
find("second").addEventListener("click", () => go(nextSecond()));
find("second").disabled = !data.steps.some((one) => one.second);
find("slider").max = String(Math.max(0, data.steps.length - 1));
find("slider").addEventListener("input", (event) => go(Number(event.target.value)));
window.addEventListener("hashchange", () => go(asked()));

function asked() {
  const named = /^#step=(\d+)$/.exec(location.hash);
  return named ? Number(named[1]) - 1 : data.open;
}

const left = data.left_out ? [`${data.left_out} later steps are left out here, and counted`] : [];
find("facts").textContent = [...data.facts, ...left].join(" · ");
drawSource();
drawTimeline();
go(asked());
