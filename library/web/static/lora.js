// LoRA files: choose, do something, read what the command prints.
"use strict";
(() => {
  const files = byId("files"), forms = [...document.querySelectorAll("[data-form]")];
  const chosen = new Map();  // in the order in which they were chosen
  let running = null;

  function showChosen() {
    byId("chosen").textContent = chosen.size ? [...chosen.values()].join(", ") : "no file chosen";
    for (const form of forms) {
      const needed = form.dataset.form === "merge" ? 2 : 1;
      form.querySelector("button.main").disabled = chosen.size < needed || running !== null;
      const output = form.querySelector("[data-output]");
      const first = [...chosen.values()][0];
      if (output && first && !output.dataset.typed) output.value = first.replace(/\.safetensors$/, `-${form.dataset.form}.safetensors`);
    }
  }

  files.addEventListener("change", (event) => {
    const box = event.target;
    if (box.checked) chosen.set(box.value, box.dataset.name); else chosen.delete(box.value);
    showChosen();
  });
  byId("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of files.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  byId("commands").addEventListener("click", (event) => {
    const name = event.target.dataset.command;
    if (!name) return;
    for (const form of forms) form.hidden = form.dataset.form !== name;
    for (const button of byId("commands").children) button.setAttribute("aria-selected", button.dataset.command === name);
  });

  function collect(form) {
    const values = {};
    for (const field of form.querySelectorAll(".field[data-name]")) {
      const control = field.querySelector("input, select");
      if (control.type === "checkbox") { if (control.checked) values[field.dataset.name] = true; }
      else if (control.value.trim()) values[field.dataset.name] = control.value.trim();
    }
    return { command: form.dataset.form, files: [...chosen.keys()], values, output: form.querySelector("[data-output]")?.value ?? "" };
  }

  async function follow(name) {
    byId("result").hidden = false;
    byId("result-state").textContent = "starting…";
    byId("result-title").textContent = name;
    byId("stop").hidden = false;
    byId("output").textContent = "";
    byId("result").scrollIntoView({ block: "nearest" });
    for (;;) {
      const answer = await ask(`/api/commands/${running}`);
      byId("output").textContent = answer.output;
      const seconds = `${answer.seconds.toFixed(1)} s`;
      byId("result-state").textContent = answer.is_running ? `working for ${seconds}…`
        : answer.is_stopped ? "stopped" : answer.code ? "not done" : `done in ${seconds}`;
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
        await follow(`${form.dataset.form}: ${[...chosen.values()].join(", ")}`);
      } catch (error) { showProblems(byId("problems"), error.message.split("\n")); }
      running = null;
      byId("stop").hidden = true;
      showChosen();
    });
  }
  byId("stop").addEventListener("click", () => ask(`/api/commands/${running}/stop`, {}));
  showChosen();
})();
