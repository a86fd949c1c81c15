// The form of a new run: presets, checks while one types, plan and memory, start.
"use strict";
(() => {
  const start = JSON.parse(byId("start-values").textContent);
  const fields = [...document.querySelectorAll(".field")];
  const controls = new Map(fields.map((field) => [field.dataset.name, field.querySelector("input, select")]));
  let checked = 0, planId = null;

  const isSet = (control) => (control.type === "checkbox" ? control.checked !== control.defaultChecked : control.value.trim() !== "");

  function collect() {
    const values = {};
    for (const [name, control] of controls) {
      if (isSet(control)) values[name] = control.type === "checkbox" ? control.checked : control.value.trim();
    }
    return { values, processes: byId("processes").value };
  }

  function fill(values) {
    for (const [name, control] of controls) {
      const value = values[name];
      if (control.type === "checkbox") control.checked = value === undefined ? control.defaultChecked : value === true || value === "true";
      else {
        control.value = value === undefined ? "" : String(value);
        if (control.tagName === "SELECT" && control.selectedIndex < 0) control.value = "";
      }
    }
    check();
  }

  function showChanged() {
    for (const field of fields) field.classList.toggle("set", isSet(controls.get(field.dataset.name)));
    for (const group of document.querySelectorAll(".group")) {
      const count = group.querySelectorAll(".field.set").length;
      group.querySelector(".changed").textContent = count ? tr("{0} set", count) : "";
    }
  }

  function showCheck(answer) {
    const { wrong, others } = showFieldProblems(fields, controls, answer.problems);
    const count = answer.problems.length, state = byId("state");
    state.className = `notice ${count ? "bad" : "good"}`;
    state.textContent = count ? count === 1 ? tr("1 problem") : tr("{0} problems", count) : tr("No problems: this run can start.");
    showProblems(byId("problems"), others.slice(0, 12));
    byId("problems").append(...[...wrong].slice(0, 12).map(([name, texts]) => {
      const button = make("button", { type: "button", className: "problem", textContent: texts.join("\n") });
      button.addEventListener("click", () => goTo(name));
      return button;
    }));
    byId("notices").replaceChildren(...answer.notices.map((text) => make("p", { textContent: text })));
    byId("toml").textContent = answer.toml || tr("(all as by default)");
    byId("command").textContent = answer.command;
    byId("start").disabled = count > 0;
  }

  function goTo(name) {
    const field = fields.find((each) => each.dataset.name === name), group = field.closest(".group");
    field.hidden = group.hidden = false;
    group.open = true;
    controls.get(name).focus();
  }

  async function check() {
    showChanged();
    const number = ++checked;
    try {
      const answer = await ask("/api/new/check", collect());
      if (number === checked) showCheck(answer);  // an older answer may come later
    } catch (error) { if (number === checked) showFailure(error); }
  }

  function showFailure(error) {
    byId("state").className = "notice bad";
    byId("state").textContent = tr("Not possible");
    byId("start").disabled = true;
    showProblems(byId("problems"), listProblems(error));
  }

  let timer;
  byId("form").addEventListener("input", (event) => {
    if (event.target.id === "memory") return;
    clearTimeout(timer);
    timer = setTimeout(check, 250);
  });

  // Enter in a field checks it; training is started by the button only.
  byId("form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("input")) { event.preventDefault(); check(); }
  });

  // Steps and buckets, and the memory estimate.
  async function plan(memory) {
    const output = byId("plan-output"), line = byId("plan-state");
    try {
      planId = (await ask("/api/new/plan", { ...collect(), memory })).id;
      byId("stop-plan").hidden = false;
      const mine = planId;
      while (mine === planId) {
        const answer = await ask(`/api/commands/${mine}`);
        output.hidden = !answer.output;
        output.textContent = answer.output;
        const seconds = answer.seconds.toFixed(0);
        line.textContent = answer.is_running ? tr("working for {0}…", `${seconds} s`) : answer.is_stopped ? tr("stopped") : answer.code ? tr("failed") : "";
        if (!answer.is_running) break;
        await new Promise((done) => setTimeout(done, 400));
      }
    } catch (error) { line.textContent = error.message; }
    byId("stop-plan").hidden = true;
  }
  byId("plan").addEventListener("click", () => plan(""));
  byId("estimate").addEventListener("click", () => plan(byId("memory").value || "24GB"));
  byId("stop-plan").addEventListener("click", () => ask(`/api/commands/${planId}/stop`, {}));

  byId("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("start").disabled = true;
    try {
      const answer = await ask("/api/jobs", collect());
      location.href = `/runs/${encodeKey(answer.run)}`;
    } catch (error) { showFailure(error); }
  });

  // Presets, files, and options found by name or help.
  // A model, then a card: the card's memory is that of the run, by which what fits is chosen.
  for (const group of new Set(start.presets.map((preset) => preset.group))) {
    const models = start.presets.flatMap((preset, number) => preset.group === group ? [make("option", { value: `${number}`, textContent: preset.name })] : []);
    byId("preset").append(make("optgroup", { label: group }, ...models));
  }
  byId("card").addEventListener("change", () => { byId("memory").value = byId("card").value; });
  const choices = ["preset", "begin-file"].flatMap((id) => byId(id) ?? []);
  for (const choice of choices) choice.addEventListener("change", () => {
    for (const other of choices) if (other !== choice) other.value = "";
    byId("begin").disabled = !choice.value;
  });
  byId("begin").addEventListener("click", () => {
    const file = byId("begin-file")?.value;
    if (file) { location.href = `/new?${new URLSearchParams({ file: file.slice("file:".length) })}`; return; }
    const own = ["dataset_config", "output_dir", "output_name"].map((name) => [name, controls.get(name).value]);
    const values = { ...start.presets[+byId("preset").value].values };
    if (values.gpu_memory) values.gpu_memory = byId("memory").value || values.gpu_memory;
    fill({ ...values, ...Object.fromEntries(own.filter(([, value]) => value)) });
  });
  const opened = new Map();
  byId("find").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of document.querySelectorAll(".group")) {
      if (!opened.has(group)) opened.set(group, group.open);
      let count = 0;
      for (const field of group.querySelectorAll(".field")) {
        const text = field.textContent.toLowerCase();
        field.hidden = !words.every((word) => text.includes(word));
        count += !field.hidden;
      }
      group.hidden = !count;
      group.open = words.length ? count > 0 : opened.get(group);
    }
    if (!words.length) opened.clear();
  });
  fill({ ...start.values, ...collect().values });  // and what was typed before this script was loaded
})();
