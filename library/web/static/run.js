// One run: charts that grow, and the end of its log.
"use strict";
const showRun = (() => {
  const key = encodeKey(byId("run").dataset.key);
  let shown = "";

  // The server makes the buttons, the settings and the list of files, for the state that the run is in.
  async function showRun(focused = document.activeElement.id) {
    const fresh = new DOMParser().parseFromString(await ask(location.pathname), "text/html");
    byId("run").dataset.state = fresh.getElementById("run").dataset.state;
    for (const part of ["#run", "[data-panel=settings]", "[data-panel=files]"])
      document.querySelector(part).replaceChildren(...fresh.querySelector(part).childNodes);
    byId("state-change").textContent = byId("status").textContent;
    returnFocus(byId(focused), document.querySelector("[role=tab][aria-selected=true]"));
  }

  async function showHead(answer) {
    if (answer.state !== byId("run").dataset.state) await showRun();
    byId("facts").textContent = answer.facts || byId("facts").textContent;
    Load.showTimeLeft(byId("time-left"), answer);
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
    byId("no-log").hidden = Boolean(text);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  setUpTabs((name) => {
    shown = name;
    if (name === "previews") Previews.load(key);
    if (name === "log") showLog();
  });
  poll(async () => {
    const answer = await ask(`/api/charts/${key}`);
    await showHead(answer);
    if (shown === "charts" || !answer.is_complete) showCharts(answer);
    if (shown === "previews") await Previews.load(key);
    if (shown === "log") await showLog();
    if (!answer.is_complete) return 50;
    return answer.status === "running" ? 2500 : 10000;
  });
  return showRun;
})();
