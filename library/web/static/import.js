// Files of other programs, dropped anywhere on the page of a new run or chosen by the button.
"use strict";
(() => {
  const MAX_BYTES = 900000, input = byId("import-files"), part = byId("import-part");

  async function take(files) {
    part.hidden = false;
    byId("import-use").hidden = true;
    byId("import-report").textContent = "";
    showProblems(byId("import-problems"), []);
    try {
      const large = files.filter((file) => file.size > MAX_BYTES).map((file) => tr("{0}: no configuration file: too large", file.name));
      if (large.length) throw new Refusal(large);
      const texts = await Promise.all(files.map(async (file) => ({ name: file.name, text: await file.text() })));
      const answer = await ask("/api/import", { files: texts });
      byId("import-report").textContent = answer.report;
      byId("import-use").href = `/new?${new URLSearchParams({ file: answer.file })}`;
      byId("import-use").hidden = false;
      byId("import-use").focus();
    } catch (error) { showProblems(byId("import-problems"), listProblems(error)); }
    part.scrollIntoView({ block: "nearest" });
    input.value = "";
  }

  byId("import").addEventListener("click", () => input.click());
  input.addEventListener("change", () => { if (input.files.length) take([...input.files]); });
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]);
  });
})();
