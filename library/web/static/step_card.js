// The card is looked for at once; what fits is asked of the planner.
"use strict";
(() => {
  const key = encodeKey(byId("project").dataset.key);
  let running = null;
  const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

  async function findCard() {
    const { id } = await ask("/api/train/card", {});
    for (;;) {
      const answer = await ask(`/api/train/card/${id}`);
      if (!answer.is_running) {
        byId("card-text").textContent = answer.text;
        if (answer.memory) byId("memory").value = answer.memory;
        return;
      }
      await wait(400);
    }
  }

  async function askPlanner() {
    byId("work").hidden = byId("stop").hidden = false;
    byId("ask").disabled = true;
    showProblems(byId("step-problems"), []);
    try {
      const { id, memory } = await ask(`/api/train/plan/${key}`, { memory: byId("memory").value || "24GB" });
      running = id;
      for (;;) {
        const answer = await ask(`/api/train/advice/${id}?${new URLSearchParams({ memory })}`);
        if (!answer.is_running) {
          byId("advice").hidden = false;
          byId("advice").replaceChildren(...answer.lines.map((text) => make("p", { textContent: text })));
          break;
        }
        byId("work-text").textContent = tr("trying what fits, for {0} seconds", answer.seconds.toFixed(0));
        await wait(500);
      }
    } catch (error) { showProblems(byId("step-problems"), listProblems(error)); }
    running = null;
    byId("work").hidden = byId("stop").hidden = true;
    byId("ask").disabled = false;
    returnFocus(byId("ask"));
  }

  byId("ask").addEventListener("click", askPlanner);
  byId("next-step").addEventListener("click", async (event) => {
    if (!byId("memory").value.trim()) return;
    event.preventDefault();
    try { await ask(`/api/train/memory/${key}`, { memory: byId("memory").value }); location.href = byId("next-step").href; }
    catch (error) { showProblems(byId("step-problems"), listProblems(error)); }
  });
  byId("memory").addEventListener("keydown", (event) => { if (event.key === "Enter") askPlanner(); });
  byId("stop").addEventListener("click", () => { if (running) ask(`/api/commands/${running}/stop`, {}).catch(() => {}); });
  findCard().catch((error) => { byId("card-text").textContent = listProblems(error).join("\n"); });
})();
