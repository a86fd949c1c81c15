// The model is taken when it is chosen; a search hides the others.
"use strict";
(() => {
  const key = encodeKey(byId("project").dataset.key), form = byId("models");
  let pending = Promise.resolve();
  async function take() {
    try { await ask(`/api/train/model/${key}`, { model: new FormData(form).get("model") }); showProblems(byId("step-problems"), []); return true; }
    catch (error) { showProblems(byId("step-problems"), listProblems(error)); return false; }
  }
  form.addEventListener("change", () => { pending = take(); });
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
