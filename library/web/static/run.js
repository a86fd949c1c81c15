// One run: charts that grow, and the end of its log.
"use strict";
(() => {
  const key = encodeKey(byId("run").dataset.key);
  const state = byId("run").dataset.state;
  let shown = "";

  // The buttons of a run are made by the server for its state.
  function showHead(answer) {
    if (answer.state !== state && !byId("viewer").open) reloadPage();
    byId("facts").textContent = answer.facts || byId("facts").textContent;
  }

  function showCharts(answer) {
    byId("reading").hidden = answer.is_complete;
    byId("read").value = answer.read;
    byId("no-steps").hidden = answer.curves.length > 0;
    Charts.show(byId("curves"), answer.curves, "run");
    byId("validation-part").hidden = !answer.validation.length;
    byId("verdict").textContent = answer.verdict;
    Charts.show(byId("validation"), answer.validation);
    byId("groups-part").hidden = !answer.groups.length;
    Charts.show(byId("groups"), answer.groups);
  }

  async function showLog() {
    const text = await ask(`/api/log/${key}`), log = byId("log");
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    if (text !== log.textContent) log.textContent = text;
    log.hidden = !text;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  setUpTabs((name) => {
    shown = name;
    if (name === "previews") Previews.load(key);
    if (name === "log") showLog();
  });
  poll(async () => {
    const answer = await ask(`/api/charts/${key}`);
    showHead(answer);
    if (shown === "charts" || !answer.is_complete) showCharts(answer);
    if (shown === "previews") await Previews.load(key);
    if (shown === "log") await showLog();
    if (!answer.is_complete) return 50;
    return answer.status === "running" ? 2500 : 10000;
  });
})();
