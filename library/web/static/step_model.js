// The model is taken when it is chosen; a search hides the others.
"use strict";
(() => {
  const key = encodeKey(byId("project").dataset.key), form = byId("models");
  let pending = Promise.resolve();
  async function take() {
    try { await ask(`/api/train/model/${key}`, { model: new FormData(form).get("model") }); showProblems(byId("step-problems"), []); return true; }
    catch (error) { showProblems(byId("step-problems"), listProblems(error)); return false; }
  }
  form.addEventListener("change", () => { pending = take(); showDownload(); });

  // A model of the hub is downloaded when the run starts, or before by this button.
  let running = null;
  const formatBytes = (count) => (count < 1e9 ? `${(count / 1e6).toFixed(0)} MB` : `${(count / 1e9).toFixed(2)} GB`);
  const isOfHub = () => form.querySelector(":checked")?.dataset.place === "hub";
  const showDownload = () => { byId("download-part").hidden = !isOfHub() && !running; };

  async function download() {
    const bar = byId("download-bar"), state = byId("download-state");
    const showRunning = (isRunning) => {
      byId("download").disabled = isRunning;
      byId("stop-download").hidden = bar.hidden = !isRunning;
    };
    try {
      running = (await ask("/api/train/download", { model: new FormData(form).get("model") })).id;
      showRunning(true);
      state.textContent = tr("asking the hub");
      for (;;) {
        const answer = await ask(`/api/commands/${running}`);
        if (answer.progress?.total) {
          const { completed, total } = answer.progress;
          bar.max = total;
          bar.value = completed;
          state.textContent = tr("{0} of {1}", formatBytes(completed), formatBytes(total));
        }
        if (!answer.is_running) {
          state.textContent = answer.is_stopped ? tr("stopped") : answer.code ? answer.output.trim().split("\n").at(-1) : tr("on this computer now");
          break;
        }
        await new Promise((done) => setTimeout(done, 500));
      }
    } catch (error) { state.textContent = listProblems(error).join("\n"); }
    running = null;
    showRunning(false);
    returnFocus(byId("download"));
  }
  byId("download").addEventListener("click", download);
  byId("stop-download").addEventListener("click", () => { if (running) ask(`/api/commands/${running}/stop`, {}).catch(() => {}); });
  showDownload();
  form.addEventListener("submit", (event) => event.preventDefault());
  // What is chosen from the beginning is taken when one goes on.
  byId("next-step").addEventListener("click", async (event) => {
    event.preventDefault();
    await pending;
    if (await take()) location.href = byId("next-step").href;
  });
  byId("find").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const choice of form.querySelectorAll(".option-card")) choice.hidden = !words.every((word) => choice.textContent.toLowerCase().includes(word));
    for (const group of form.querySelectorAll("fieldset")) group.hidden = !group.querySelector(".option-card:not([hidden])");
  });
})();
