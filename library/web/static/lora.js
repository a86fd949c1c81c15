// LoRA files: choose, do something, read what the command prints.
"use strict";
(() => {
  const files = byId("files"), forms = [...document.querySelectorAll("[data-form]")];
  const chosen = new Map();  // in the order in which they were chosen
  let running = null;

  function showChosen() {
    byId("chosen").textContent = chosen.size ? [...chosen.values()].join(", ") : tr("no file chosen");
    for (const form of forms) {
      const models = [...form.querySelectorAll("[data-model]")];
      const isReady = chosen.size >= +form.dataset.files && models.every((select) => select.value);
      form.querySelector("button.main").disabled = !isReady || running !== null;
      suggestOutput(form, models);
    }
  }

  // A name for the new file, from the first input, until one is typed.
  function suggestOutput(form, models) {
    const output = form.querySelector("[data-output]"), model = models.at(-1);
    if (!output || output.dataset.typed) return;
    const first = (model ? model.selectedOptions[0].value && model.selectedOptions[0].text : [...chosen.values()][0]) || "";
    const name = first.split("/").at(-1), stem = name.replace(/\.safetensors$/, "");
    const end = form.dataset.form === "extract" || stem !== name || !model ? ".safetensors" : "";
    output.value = name ? `${stem}-${form.dataset.form.replace(" into a model", "d")}${end}` : "";
  }

  files.addEventListener("change", (event) => {
    const box = event.target;
    if (box.checked) chosen.set(box.value, box.dataset.name); else chosen.delete(box.value);
    showChosen();
  });
  for (const select of document.querySelectorAll("[data-model]")) select.addEventListener("change", showChosen);
  byId("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of files.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  byId("commands").addEventListener("click", (event) => {
    const name = event.target.dataset.command;
    if (!name) return;
    for (const form of forms) form.hidden = form.dataset.form !== name;
    for (const button of byId("commands").children) button.setAttribute("aria-pressed", button.dataset.command === name);
  });

  function collect(form) {
    const values = {};
    for (const field of form.querySelectorAll(".field[data-name]")) {
      const control = field.querySelector("input, select");
      if (control.type === "checkbox") { if (control.checked) values[field.dataset.name] = true; }
      else if (control.value.trim()) values[field.dataset.name] = control.value.trim();
    }
    const models = Object.fromEntries([...form.querySelectorAll("[data-model]")].map((select) => [select.dataset.model, select.value]));
    return { command: form.dataset.form, models, files: [...chosen.keys()], values, output: form.querySelector("[data-output]")?.value ?? "" };
  }

  function showProgress(progress) {
    const holder = byId("result-progress"), [bar, text] = holder.children;
    holder.hidden = !progress;
    if (!progress) return;
    Object.assign(bar, { max: progress.total, value: progress.completed });
    text.textContent = tr("{0}: {1} of {2}", progress.title, progress.completed.toLocaleString(), progress.total.toLocaleString());
  }

  async function follow(name) {
    byId("result").hidden = false;
    byId("result-state").textContent = tr("starting…");
    byId("result-title").textContent = name;
    byId("stop").hidden = false;
    byId("output").textContent = "";
    byId("result").scrollIntoView({ block: "nearest" });
    returnFocus(byId("stop"));
    for (;;) {
      const answer = await ask(`/api/commands/${running}`);
      byId("output").textContent = answer.output;
      const seconds = `${answer.seconds.toFixed(1)} s`;
      byId("result-state").textContent = answer.is_running ? tr("working for {0}…", seconds)
        : answer.is_stopped ? tr("stopped") : answer.code ? tr("not done") : tr("done in {0}", seconds);
      showProgress(answer.progress);
      if (!answer.is_running) return;
      await new Promise((done) => setTimeout(done, 300));
    }
  }

  for (const form of forms) {
    form.querySelector("[data-output]")?.addEventListener("input", (event) => { event.target.dataset.typed = "yes"; });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        byId("problems").replaceChildren();
        running = (await ask("/api/lora", collect(form))).id;
        showChosen();
        const inputs = +form.dataset.files ? [...chosen.values()] : [...form.querySelectorAll("[data-model]")].map((select) => select.selectedOptions[0].text);
        await follow(`${form.dataset.form}: ${inputs.join(", ")}`);
      } catch (error) { showProblems(byId("problems"), listProblems(error)); }
      running = null;
      byId("stop").hidden = true;
      showChosen();
      returnFocus(form.querySelector("button.main"));
    });
  }
  byId("stop").addEventListener("click", () => ask(`/api/commands/${running}/stop`, {}));
  showChosen();
})();
