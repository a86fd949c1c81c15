// Tells when a run ends, whatever page is open: by the browser where it may, and by a line at the bottom of the page.
"use strict";
(() => {
  const button = byId("notify"), KEY = "run-states", WANTED = "tell-me", EVERY = 8000;
  const canNotify = "Notification" in window && isSecureContext;
  const isWanted = () => localStorage.getItem(WANTED) === "yes";
  const showWanted = () => button.setAttribute("aria-pressed", isWanted());

  // It is there from the beginning: screen readers tell only what is added to it.
  const holder = make("div", { id: "told" });
  holder.setAttribute("role", "status");
  document.body.append(holder);

  const describe = (name, status) => ({
    finished: tr("{0} is finished.", name), stopped: tr("{0} has stopped.", name), failed: tr("{0} has failed.", name) })[status];

  function tell(key, { name, status }) {
    const text = describe(name, status);
    if (!text) return;
    const close = make("button", { type: "button", textContent: tr("Close") });
    const line = make("p", { className: `notice ${status === "finished" ? "good" : ""}` }, make("a", { href: `/runs/${encodeKey(key)}`, textContent: text }), " ", close);
    close.addEventListener("click", () => line.remove());
    holder.append(line);
    if (canNotify && Notification.permission === "granted") new Notification("Lorikeet", { body: text, tag: `${key} ${status}` });
  }

  // What this window has seen last: each window tells.  A new one begins with what any other has seen.
  const readBefore = () => JSON.parse(sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "{}");
  function keep(states) { for (const storage of [sessionStorage, localStorage]) storage.setItem(KEY, JSON.stringify(states)); }

  // Also while the page is not seen, which is when one wants to be told.
  async function look() {
    if (isWanted()) {
      try {
        const states = await ask("/api/states"), before = readBefore();
        keep(states);
        for (const [key, state] of Object.entries(states))
          if (before[key]?.status === "running" && state.status !== "running") tell(key, state);
      } catch { /* the page itself says when the server does not answer */ }
    }
    setTimeout(look, EVERY);
  }

  button.hidden = false;
  showWanted();
  button.addEventListener("click", async () => {
    const isOn = button.getAttribute("aria-pressed") === "true";
    localStorage.setItem(WANTED, isOn ? "no" : "yes");
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
    if (!isOn && canNotify && Notification.permission === "default") await Notification.requestPermission();
    button.setAttribute("aria-pressed", !isOn);
    if (!isOn) { try { keep(await ask("/api/states")); } catch { /* the next look asks again */ } }
  });
  look();
})();
