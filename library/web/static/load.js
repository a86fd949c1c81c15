// The load of the cards and of this computer, and the time and electricity that a run still needs.
"use strict";
const Load = (() => {
  const holder = byId("load"), GIB = 2 ** 30, PRICE = "price-of-a-kilowatt-hour";
  let power = null;

  function buildMeter(label, value, most, text) {
    const bar = make("meter", { min: 0, max: most || 1, value: value ?? 0 });
    bar.setAttribute("aria-label", `${label}: ${text}`);
    return make("span", { className: "reading" }, make("small", { className: "soft", textContent: label }), bar, make("span", { textContent: text }));
  }

  const formatMemory = (used, total) => (used == null || !total ? tr("unknown") : `${(used / GIB).toFixed(1)} / ${(total / GIB).toFixed(0)} GB`);

  function buildCard(card) {
    const parts = [
      buildMeter(tr("use"), card.use, 100, card.use == null ? tr("unknown") : `${card.use.toFixed(0)} %`),
      buildMeter(tr("memory"), card.memory_used, card.memory_total, formatMemory(card.memory_used, card.memory_total)),
    ];
    if (card.temperature != null) parts.push(make("span", { className: "reading", textContent: `${card.temperature.toFixed(0)} °C` }));
    if (card.power != null) {
      const limit = card.power_limit == null ? "" : ` / ${card.power_limit.toFixed(0)}`;
      parts.push(make("span", { className: "reading", textContent: `${card.power.toFixed(0)}${limit} W` }));
    }
    return make("div", { className: "load-row" }, make("strong", { textContent: `${card.index}: ${card.name}` }), ...parts);
  }

  function buildHost(host, hasCards) {
    return make("div", { className: "load-row" },
      make("strong", { textContent: hasCards ? tr("This computer") : tr("This computer, no NVIDIA card found") }),
      buildMeter(tr("use"), host.use, 100, `${host.use.toFixed(0)} %`),
      buildMeter(tr("memory"), host.memory_used, host.memory_total, formatMemory(host.memory_used, host.memory_total)));
  }

  function formatSeconds(seconds) {
    const minutes = Math.round(seconds / 60);
    if (minutes < 1) return tr("less than a minute");
    return minutes < 60 ? tr("{0} min", minutes) : tr("{0} h {1} min", Math.floor(minutes / 60), minutes % 60);
  }

  function formatEnergy(wattHours) {
    const price = parseFloat(localStorage.getItem(PRICE) ?? ""), hours = wattHours / 1000;
    const text = `${hours.toFixed(hours < 10 ? 2 : 0)} kWh`;
    return Number.isFinite(price) && price > 0 ? `${text} (${(hours * price).toFixed(2)})` : text;
  }

  // The price is asked for on this computer only, in whatever currency.
  function buildPrice() {
    const field = make("input", { size: 5, inputMode: "decimal", value: localStorage.getItem(PRICE) ?? "", placeholder: "0.30" });
    field.setAttribute("aria-label", tr("Price of a kilowatt-hour"));
    field.addEventListener("change", () => localStorage.setItem(PRICE, field.value.replace(",", ".").trim()));
    return make("label", { className: "soft small price" }, tr("price of a kWh"), " ", field);
  }

  function showTimeLeft(line, answer) {
    const parts = [];
    if (answer.seconds_left != null) {
      const end = new Date(Date.now() + answer.seconds_left * 1000);
      const day = end.toDateString() === new Date().toDateString() ? {} : { weekday: "short" };
      parts.push(tr("{0} left, until {1}", formatSeconds(answer.seconds_left), end.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...day })));
      if (power) parts.push(tr("about {0} more for the cards", formatEnergy(power * answer.seconds_left / 3600)));
    }
    if (answer.watt_hours != null) parts.push(tr("{0} used by the cards", formatEnergy(answer.watt_hours)));
    line.hidden = !parts.length;
    if (line.contains(document.activeElement)) return;
    line.replaceChildren(parts.join(", "), ...(power || answer.watt_hours != null ? [" ", buildPrice()] : []));
  }

  if (holder) poll(async () => {
    const answer = await ask("/api/load");
    power = answer.power;
    holder.hidden = false;
    holder.replaceChildren(...answer.cards.map(buildCard), buildHost(answer.host, answer.cards.length > 0));
    return 2500;
  });
  return { showTimeLeft };
})();
