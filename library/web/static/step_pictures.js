// The pictures with what is wrong with each, and the buttons that mend it.
"use strict";
(() => {
  const key = encodeKey(stepKey), countPictures = (count) => (count === 1 ? tr("1 picture") : tr("{0} pictures", count));
  let shown = { pictures: [] };

  const address = (picture, isLarge) => `/train-picture/${key}?${new URLSearchParams({ path: picture.path, v: picture.version, ...(isLarge ? { large: 1 } : {}) })}`;

  function makeFrame(picture) {
    const frame = make("div", { className: "frame" });
    if (picture.is_readable) frame.append(make("img", { src: address(picture), alt: picture.name, loading: "lazy" }));
    else frame.textContent = tr("no picture");
    return frame;
  }

  async function load() {
    const answer = await ask(`/api/train/pictures/${key}`);
    byId("progress-part").hidden = !answer.is_running;
    if (answer.is_running) {
      byId("progress").max = Math.max(1, answer.total);
      byId("progress").value = answer.completed;
      byId("progress-text").textContent = tr("looking at picture {0} of {1}", answer.completed, answer.total);
      await new Promise((done) => setTimeout(done, 250));
      return load();
    }
    if (answer.problems.length) { showProblems(byId("step-problems"), answer.problems); return; }
    shown = answer;
    show();
  }

  function show() {
    const faulty = shown.pictures.filter((each) => each.faults.length), good = shown.pictures.filter((each) => !each.faults.length);
    const wrong = shown.pictures.length ? faulty.length ? tr("something to look at in {0}", faulty.length) : tr("nothing is wrong with them") : tr("drop some here");
    byId("summary").textContent = `${countPictures(shown.pictures.length)}, ${wrong}`;
    byId("folders").replaceChildren(...shown.folders.filter((each) => each.name || each.masks).map(describeFolder));
    showMendAll(faulty);
    byId("faults").replaceChildren(...faulty.map(makeFaulty));
    byId("good-part").hidden = !good.length;
    byId("good-part").open = !faulty.length;
    byId("good-title").textContent = tr("{0} without a fault", countPictures(good.length));
    byId("good").replaceChildren(...good.map((picture) => {
      const frame = makeFrame(picture);
      frame.title = picture.caption || picture.name;
      if (picture.has_mask) frame.append(make("span", { className: "tag", textContent: tr("mask") }));
      return frame;
    }));
    const undo = byId("undo");
    undo.hidden = !shown.num_undo;
    undo.textContent = tr("Undo ({0})", shown.num_undo);
    byId("next-step").classList.toggle("main", shown.pictures.some((each) => each.is_readable));
  }

  function describeFolder(folder) {
    const parts = [countPictures(folder.count)];
    if (folder.is_reg) parts.push(tr("for comparison (regularization)"));
    if (!folder.is_used) parts.push(tr("not used, because all pictures to train on have masks"));
    if (folder.repeats !== 1) parts.push(tr("each {0} times", folder.repeats));
    if (folder.class_tokens) parts.push(tr("without a caption: “{0}”", folder.class_tokens));
    if (folder.masks) parts.push(folder.masks === folder.count ? tr("with masks") : tr("{0} of {1} masks, which are used when all are there", folder.masks, folder.count));
    return make("p", { textContent: `${folder.name || tr("Pictures")}: ${parts.join(", ")}` });
  }

  // One button for all pictures that the same thing mends, without choosing anything.
  function showMendAll(faulty) {
    const kinds = { rotate: ["sideways", tr("Turn all upright")], remove: ["duplicate", tr("Remove all copies")], convert: ["", tr("Convert all to PNG")] };
    const buttons = Object.entries(kinds).flatMap(([mend, [kind, label]]) => {
      const chosen = faulty.filter((each) => each.faults.some((fault) => fault.mend === mend && (!kind || fault.kind === kind)));
      if (chosen.length < 2) return [];
      const button = make("button", { type: "button", textContent: `${label} (${chosen.length})` });
      button.addEventListener("click", () => mendAll(mend, chosen, button));
      return [button];
    });
    byId("mend-all").replaceChildren(...buttons);
  }

  function makeFaulty(picture) {
    const card = make("div", { className: "card faulty" }), text = make("div");
    text.append(make("strong", { textContent: picture.name }));
    if (picture.is_readable) text.append(make("span", { className: "soft small", textContent: ` ${picture.size.join(" × ")}` }));
    for (const fault of picture.faults) {
      const line = make("div", { className: "fault" }, make("span", { className: "small", textContent: fault.text }));
      if (fault.mend) {
        const button = make("button", { type: "button", textContent: fault.label });
        button.setAttribute("aria-label", `${fault.label}: ${picture.name}`);
        button.addEventListener("click", () => fault.mend === "crop" ? openCrop(picture) : mendAll(fault.mend, [picture], button));
        line.append(button);
      } else if (fault.kind === "no caption") line.append(make("a", { href: `/train/captions/${key}`, textContent: tr("Write one") }));
      text.append(line);
    }
    card.append(makeFrame(picture), text);
    return card;
  }

  async function mendAll(mend, pictures, button, position) {
    const place = [...document.querySelectorAll("#faults button, #mend-all button")].indexOf(button);
    if (button) button.disabled = true;
    try {
      await ask(`/api/train/mend/${key}`, { mend, paths: pictures.map((each) => each.path), position });
      showProblems(byId("step-problems"), []);
      await load();
      returnFocus(document.querySelectorAll("#faults button, #mend-all button")[Math.max(0, place)], byId("next-step"));
    } catch (error) { showProblems(byId("step-problems"), listProblems(error)); if (button) button.disabled = false; }
  }

  byId("undo").addEventListener("click", async () => {
    try { await ask(`/api/train/undo/${key}`, {}); await load(); returnFocus(byId("undo"), byId("next-step")); }
    catch (error) { showProblems(byId("step-problems"), listProblems(error)); }
  });

  // The crop: a frame of the shape in which the picture is trained, and where it stands.
  let cropped = null;
  function placeCrop() {
    const [, , width, height] = cropped.crop, share = byId("crop-position").value / 100, frame = byId("crop-frame").style;
    frame.left = `${100 * (1 - width) * share}%`;
    frame.top = `${100 * (1 - height) * share}%`;
    frame.width = `${100 * width}%`;
    frame.height = `${100 * height}%`;
  }
  function openCrop(picture) {
    cropped = picture;
    byId("crop-name").textContent = picture.name;
    // The buttons stay where they are while the picture is loaded.
    const [width, height] = picture.size, frame = byId("crop-picture").style;
    frame.aspectRatio = `auto ${width} / ${height}`;
    frame.width = `min(${width}px, ${60 * width / height}vh)`;
    byId("crop-picture").src = address(picture, true);
    byId("crop-position").value = 50;
    placeCrop();
    byId("crop-dialog").showModal();
    byId("crop-position").focus();
  }
  byId("crop-position").addEventListener("input", placeCrop);
  byId("crop-cancel").addEventListener("click", () => byId("crop-dialog").close());
  byId("crop-apply").addEventListener("click", async () => {
    byId("crop-dialog").close();
    await mendAll("crop", [cropped], null, byId("crop-position").value / 100);
  });

  load().catch((error) => showProblems(byId("step-problems"), listProblems(error)));
})();
