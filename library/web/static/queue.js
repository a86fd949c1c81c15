// Buttons that stop, remove and resume runs, wherever they are on a page.
"use strict";
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-stop], [data-remove], [data-resume]");
  if (!button) return;
  button.disabled = true;
  try {
    if (button.dataset.stop) await ask(`/api/jobs/${button.dataset.stop}/stop`, {});
    if (button.dataset.remove) await ask(`/api/jobs/${button.dataset.remove}/remove`, {});
    if (button.dataset.resume) await ask("/api/jobs/resume", { run: button.dataset.resume });
    if (byId("queue")) await showQueue(button.closest("tr")?.dataset.job); else await showRun(button.id);
  } catch (error) { showProblems(byId("job-problems"), listProblems(error)); button.disabled = false; }
});

async function showQueue(id) {
  byId("queue").innerHTML = await ask("/api/queue");  // from our own template, which escapes every name
  const row = [...byId("queue").rows].find((each) => each.dataset.job === id) ?? byId("queue").rows[0];
  if (id) returnFocus(row?.querySelector("button"), byId("filter"));
  byId("queue-part").hidden = !byId("queue").rows.length;
}

if (byId("queue")) poll(async () => {
  if (!byId("queue").contains(document.activeElement)) await showQueue();
  return 2500;
});
