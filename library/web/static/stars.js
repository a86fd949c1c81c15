// The star of a run, in the list and on its page.
"use strict";
document.addEventListener("click", async (event) => {
  const star = event.target.closest("[data-star]");
  if (!star) return;
  const holder = star.closest("[data-key]"), isFavorite = star.getAttribute("aria-pressed") === "false";
  try {
    await ask("/api/runs/notes", { run: holder.dataset.key, is_favorite: isFavorite });
    star.setAttribute("aria-pressed", isFavorite);
    holder.toggleAttribute("data-favorite", isFavorite);
  } catch (error) { showProblems(byId("job-problems"), listProblems(error)); }
});
