// The settings, their checks while one types, the files that they become, and the start.
"use strict";
(() => {
  const key = encodeKey(byId("project").dataset.key), start = JSON.parse(byId("start-values").textContent);
  const fields = [...document.querySelectorAll(".field[data-name]")];
  const controls = new Map(fields.map((field) => [field.dataset.name, field.querySelector("input, select")]));
  let checked = 0, timer;

  for (const [name, control] of controls) {
    const value = start.values[name];
    if (value === undefined) continue;
    if (control.type === "checkbox") control.checked = value === true || value === "true"; else control.value = String(value);
  }
  byId("prompts").value = start.prompts;

  function collect() {
    const values = {};
    for (const [name, control] of controls) {
      if (control.type === "checkbox") { if (control.checked !== control.defaultChecked || name in start.values) values[name] = control.checked; }
      else if (control.value.trim() !== "") values[name] = control.value.trim();
    }
    return { values, prompts: byId("prompts").value };
  }

  function showCheck(answer) {
    const { wrong, others } = showFieldProblems(fields, controls, answer.problems);
    for (const field of fields) {
      if (!wrong.has(field.dataset.name)) continue;
      for (let part = field.parentElement; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    }
    const count = answer.problems.length;
    showState(!count, count ? count === 1 ? tr("One thing is wrong.") : tr("{0} things are wrong.", count) : tr("Nothing is wrong: it can start."));
    showProblems(byId("problems"), others);
    byId("notices").replaceChildren(...answer.notices.map((text) => make("p", { textContent: text })));
    byId("dataset-name").textContent = answer.files[0];
    byId("run-name").textContent = answer.files[1];
    byId("dataset").textContent = answer.dataset;
    byId("toml").textContent = answer.run;
    byId("command").textContent = answer.command;
  }

  function showState(isGood, text) {
    byId("state").className = `notice ${isGood ? "good" : "bad"}`;
    byId("state").textContent = text;
    byId("start").disabled = !isGood;
  }

  async function check() {
    const number = ++checked;
    try {
      const answer = await ask(`/api/train/check/${key}`, collect());
      if (number === checked) showCheck(answer);
    } catch (error) {
      if (number === checked) { showState(false, tr("It cannot start yet.")); showProblems(byId("problems"), listProblems(error)); }
    }
  }

  byId("form").addEventListener("input", (event) => {
    if (event.target.id === "find") return;
    clearTimeout(timer);
    timer = setTimeout(check, 300);
  });
  byId("form").addEventListener("submit", (event) => { event.preventDefault(); check(); });
  byId("form").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.matches("input")) { event.preventDefault(); check(); } });
  byId("find").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of document.querySelectorAll("#all .group")) {
      let count = 0;
      for (const field of group.querySelectorAll(".field")) {
        field.hidden = !words.every((word) => field.textContent.toLowerCase().includes(word));
        count += !field.hidden;
      }
      group.hidden = !count;
      group.open = words.length > 0 && count > 0;
    }
  });
  byId("start").addEventListener("click", async () => {
    clearTimeout(timer);
    checked += 1;
    byId("start").disabled = true;
    try { location.href = `/runs/${encodeKey((await ask(`/api/train/start/${key}`, collect())).run)}`; }
    catch (error) { showProblems(byId("problems"), listProblems(error)); showState(false, tr("It did not start.")); returnFocus(byId("form")); }
  });
  check();
})();
