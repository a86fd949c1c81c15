// What all pages use: requests, elements, tabs, polling.  All text goes into the page as text, never as HTML of ours.
"use strict";
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A text of the page in the language of the reader, by its English words; {0}, {1} are filled in.
const TEXTS = JSON.parse(byId("texts")?.textContent ?? "{}");
const tr = (text, ...values) => (TEXTS[text] ?? text).replace(/\{(\d)\}/g, (_, number) => values[+number]);

// The words of charts, whose scripts the report of a run has, too.
const CHART_WORDS = {
  step: tr("step"), group: tr("group"), low: tr("low"), high: tr("high"),
  keys: tr("arrow keys read values, plus and minus zoom, 0 shows all"),
};

// The language is a choice of this browser.
byId("language")?.addEventListener("change", (event) => {
  document.cookie = `language=${event.target.value}; path=/; max-age=31536000; samesite=strict`;
  try { sessionStorage.setItem("focus", "language"); } catch { /* storage may be blocked */ }
  location.reload();
});
// What had the focus has it again after the page was loaded anew.
try {
  byId(sessionStorage.getItem("focus") ?? "")?.focus();
  sessionStorage.removeItem("focus");
} catch { /* storage may be blocked */ }

// A path in an address: slashes stay.
const encodeKey = (key) => key.split("/").map(encodeURIComponent).join("/");

// What the server says is wrong, a line for each problem.
class Refusal extends Error {
  constructor(lines) { super(lines.join("\n")); this.lines = lines; }
}
const listProblems = (error) => error.lines || [error.message];

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  const isJson = (answer.headers.get("Content-Type") || "").startsWith("application/json");
  const value = isJson ? await answer.json() : await answer.text();
  if (!answer.ok) throw new Refusal(isJson ? value.problems?.map((each) => each.line) ?? [value.error] : [`${answer.status}: ${value}`]);
  return value;
}

// Calls an action again and again while the page is seen; the action returns the milliseconds to wait, or null to end.
function poll(action) {
  let failures = 0;
  const run = async () => {
    let wait = 3000;
    if (!document.hidden) {
      try { wait = await action(); failures = 0; showConnection(true); }
      catch (error) { failures += 1; wait = Math.min(30000, 2000 * failures); showConnection(false, error); }
    }
    if (wait !== null) setTimeout(run, wait);
  };
  run();
}

function showConnection(isUp, error) {
  let line = byId("connection");
  if (isUp) { line?.remove(); return; }
  if (!line) {
    line = make("p", { id: "connection", className: "problem" });
    line.setAttribute("role", "status");
    byId("content").prepend(line);
  }
  line.textContent = error instanceof TypeError ? tr("The server does not answer. Is it still running?") : error.message;
}

function showProblems(holder, problems) {
  holder.replaceChildren(...problems.map((text) => make("p", { className: "problem", textContent: text })));
}

// Shows each problem at its field; returns the problems by field, and those of no field.
function showFieldProblems(fields, controls, problems) {
  const wrong = new Map(), others = [];
  for (const { field, text } of problems) {
    if (controls.has(field)) wrong.set(field, [...(wrong.get(field) ?? []), text]);
    else others.push(text);
  }
  for (const field of fields) {
    const texts = wrong.get(field.dataset.name), line = field.querySelector(".wrong");
    field.classList.toggle("bad", !!texts);
    controls.get(field.dataset.name).setAttribute("aria-invalid", !!texts);
    line.hidden = !texts;
    line.textContent = (texts ?? []).join("\n");
  }
  return { wrong, others };
}

// What has the focus loses it when it is disabled, hidden or replaced: it gets it back, or what comes instead of it.
function returnFocus(...elements) {
  const active = document.activeElement;
  if (active && active !== document.body && !active.disabled) return;
  elements.find((element) => element?.isConnected && !element.disabled && element.getClientRects().length)?.focus();
}

function setUpTabs(onShow) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const show = (name) => {
    for (const tab of tabs) {
      const isShown = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", isShown);
      tab.tabIndex = isShown ? 0 : -1;
      document.querySelector(`[data-panel="${tab.dataset.tab}"]`).hidden = !isShown;
    }
    history.replaceState(null, "", `#${name}`);
    onShow?.(name);
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => show(tab.dataset.tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(index + step + tabs.length) % tabs.length];
      next.focus();
      show(next.dataset.tab);
    });
  });
  const named = tabs.find((tab) => tab.dataset.tab === location.hash.slice(1));
  show((named ?? tabs[0]).dataset.tab);
}
