// Opens a trace page in headless Chromium, uses it as a reader would, and prints what was seen as JSON.
//
//     node drive.mjs PAGE.html STEP      STEP: one that looks two pages up, from 1 on

import { pathToFileURL } from "node:url";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [, , file, twice] = process.argv;
const url = pathToFileURL(file).href;
const seen = { errors: [], requests: [], steps: {}, schemes: {} };

const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(), args: chromium.args, headless: "shell",
});
try {
  seen.browser = await browser.version();
  const page = await browser.newPage();
  page.on("console", (message) => { if (["error", "warn"].includes(message.type())) seen.errors.push(message.text()); });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => { if (!request.url().startsWith("data:")) seen.requests.push(request.url()); });
  await page.setViewport({ width: 1400, height: 900 });
  await page.goto(url);
  await walk(page);
  await look(page);
  await page.setViewport({ width: 1500, height: 900 });
  seen.cut = await page.evaluate(() => {
    const box = document.getElementById("code");
    return [box.scrollWidth - box.clientWidth, ...[...box.querySelectorAll("td:last-child")].map((cell) => cell.scrollWidth - cell.clientWidth)];
  });
  await page.setViewport({ width: 1400, height: 900 });
  for (const scheme of ["light", "dark"]) seen.schemes[scheme] = await colours(page, scheme);
  await narrow(page);
} finally {
  await browser.close();
}
console.log(JSON.stringify(seen));

function status(page) {
  return page.evaluate(() => Number(/^step (\d+) of/.exec(document.getElementById("status").textContent)[1]));
}

// Every way to move, and where it leads.
async function walk(page) {
  seen.count = await page.evaluate(() => document.querySelectorAll("#timeline button").length);
  seen.steps.opened = await status(page);
  seen.marked = await page.evaluate(() => [...document.querySelectorAll("#timeline button")].flatMap((b, i) =>
    getComputedStyle(b, "::after").content === '"2"' ? [i + 1] : []));
  for (const key of ["Home", "ArrowRight", "j", "ArrowLeft", "k", "k", "End", "j", "n", "Home", "n", "n", "Home"]) {
    await page.keyboard.press(key);
    (seen.steps.keys ||= []).push([key, await status(page)]);
  }
  for (const id of ["next", "next", "back", "last", "second", "first", "second", "second", "first"]) {
    await page.click(`#${id}`);
    (seen.steps.buttons ||= []).push([id, await status(page)]);
  }
  seen.disabled = await page.evaluate(() => ["first", "back", "next", "last"].map((id) => document.getElementById(id).disabled));
  await page.click("#timeline button:nth-of-type(3)");
  seen.steps.timeline = await status(page);
  await page.evaluate(() => {
    const slider = document.getElementById("slider");
    slider.value = "6";
    slider.dispatchEvent(new Event("input"));
  });
  seen.steps.slider = await status(page);
  await page.evaluate(() => { document.activeElement.blur(); });
  await page.keyboard.press("Tab");
  seen.focus = await page.evaluate(() => [document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]);
}

// The step whose item lies in two pages; the names that a screen reader is given.
async function look(page) {
  await page.goto(`${url}#step=${twice}`);
  await page.reload();
  seen.twice = await page.evaluate(() => ({
    status: document.getElementById("status").textContent,
    lookups: document.getElementById("lookups").textContent,
    lit: [...document.querySelectorAll("#lit rect")].map((r) => [r.getAttribute("class"), r.getBoundingClientRect().width]),
    lines: [...document.querySelectorAll("#code tr.on")].map((row) => row.lastChild.textContent.trim()),
    here: document.querySelectorAll("#code tr.here").length,
    visible: (() => {
      const row = document.querySelector("#code tr.here").getBoundingClientRect();
      const box = document.getElementById("code").getBoundingClientRect();
      return row.top >= box.top - 1 && row.bottom <= box.bottom + 1;
    })(),
    rows: document.querySelectorAll("#rows tr").length,
    current: document.querySelectorAll("#timeline [aria-current]").length,
    unnamed: [...document.querySelectorAll("button, input, [role=img], [tabindex='0']")]
      .filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim())).length,
  }));
}

// Backgrounds, and the least contrast between a text and what lies behind it.
async function colours(page, scheme) {
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  return page.evaluate(() => {
    const parts = (text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const light = (text) => {
      const [r, g, b] = parts(text).slice(0, 3).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor;
        if (parts(colour).length < 4 || parts(colour)[3] > 0) return colour;
      }
      return "rgb(255, 255, 255)";
    };
    const contrast = (element) => {
      const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    const texts = [...document.querySelectorAll("h1, h2, p, li, td, th, output, nav button:enabled")].filter((e) => e.textContent.trim());
    return { background: getComputedStyle(document.body).backgroundColor, contrast: Math.min(...texts.map(contrast)) };
  });
}

// A phone's width: one column, and nothing wider than the window.
async function narrow(page) {
  await page.setViewport({ width: 360, height: 740 });
  seen.narrow = await page.evaluate(() => ({
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    lefts: new Set([...document.querySelectorAll("main > section")].map((s) => Math.round(s.getBoundingClientRect().left))).size,
    tops: new Set([...document.querySelectorAll("main > section")].map((s) => Math.round(s.getBoundingClientRect().top))).size,
    sections: document.querySelectorAll("main > section").length,
  }));
  await page.keyboard.press("Home");
  seen.steps.narrow = await status(page);
}
