// The dashboard's only script. Every page works without it. It does two things: it renews what a page shows, and it shows
// times in the zone of the browser. Text comes from the server escaped; here it stays text or is an element of that page.
"use strict";

(() => {
  const main = document.getElementById("main");

  // What this browser keeps of a visitor's choices. Without storage they hold for the page only.
  const chosen = new Map();
  function kept(name) {
    try { return localStorage.getItem(`pgqueue.${name}`) ?? chosen.get(name); } catch { return chosen.get(name); }
  }
  function keep(name, value) {
    chosen.set(name, value);
    try { localStorage.setItem(`pgqueue.${name}`, value); } catch { /* storage is off */ }
  }

  // Times ---------------------------------------------------------------------------------------------------------------

  const zone = document.getElementById("zone");
  const zoneSwitch = document.getElementById("zone-switch");
  const two = (number) => String(number).padStart(2, "0");

  function utc(at) {
    return at.toISOString().slice(0, 19).replace("T", " ");
  }

  function local(at) {
    const day = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join("-");
    return `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")}`;
  }

  // Midnight between two offsets of a zone is told by the title, which is always UTC.
  function showTimes(root) {
    const show = kept("zone") === "local" ? local : utc;
    for (const each of root.querySelectorAll("time[datetime]")) {
      const at = new Date(each.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      each.title = `${utc(at)} UTC`;
      if (each.className === "ago") { // the text tells how long ago that was
        if (show === local) each.title = `${local(at)} ${zoneName()}`;
        continue;
      }
      const text = part(show(at), each.className);
      if (each.textContent !== text) each.textContent = text;
    }
  }

  // What a chart shows of a time: its columns are narrow.
  function part(text, form) {
    return form === "clock" ? text.slice(11, 16) : form === "date" ? text.slice(5, 10) : form === "moment" ? text.slice(5, 16) : text;
  }

  function zoneName() {
    return Intl.DateTimeFormat().resolvedOptions().timeZone || "the zone of this browser";
  }

  function showZone() {
    const here = kept("zone") === "local";
    zone.textContent = here ? `in ${zoneName()}` : "UTC";
    zoneSwitch.textContent = here ? "Show UTC" : "Show my zone";
    showTimes(main);
  }

  zoneSwitch.hidden = false;
  zoneSwitch.addEventListener("click", () => {
    keep("zone", kept("zone") === "local" ? "utc" : "local");
    showZone();
  });
  showZone();

  // Live updates ----------------------------------------------------------------------------------------------------------

  // A push says only that something has changed; then the same page is asked for. Behind it the page is asked for now and
  // then, more rarely if that fails. A page that is slow is asked for rarely, too.
  const LEAST = 1000, STREAMED = 10000, POLLED = 5000, LONGEST = 60000, ANSWER = 20000; // milliseconds
  const SLOWER = 4; // times what the page took, between two renewals

  const way = main.dataset.live; // "stream", or "poll" where there is no stream; not set if the page stays as it is
  const liveSwitch = document.getElementById("live-switch");
  let source = null, timer = 0, dueAt = Infinity, asking = false, failed = 0, notBefore = 0;

  const on = () => kept("live") !== "off";

  // A field that differs from what the server sent: typed input, a choice, a selected row.
  const touched = new Set();
  function differs(field) {
    if (!field.isConnected) return false;
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    return field.tagName === "SELECT" || field.value !== field.defaultValue;
  }
  main.addEventListener("input", (event) => touched.add(event.target));

  // Between pressing and releasing a button, or the space key on it, nothing may move away from under it.
  let pressed = false;
  addEventListener("pointerdown", () => { pressed = true; });
  addEventListener("keydown", (event) => { if (event.key === " ") pressed = true; });
  for (const each of ["pointerup", "pointercancel", "keyup", "blur"]) {
    addEventListener(each, () => setTimeout(() => { pressed = false; }, 300));
  }

  function busy() {
    for (const each of touched) if (!differs(each)) touched.delete(each);
    const active = document.activeElement, selection = getSelection();
    return pressed || touched.size > 0
      || [...main.querySelectorAll("input[type=checkbox]:checked")].some(differs) // also where the browser has ticked it again
      || (main.contains(active) && active.matches("input:not([type=checkbox], [type=radio]), textarea, select"))
      || (selection !== null && !selection.isCollapsed && main.contains(selection.anchorNode));
  }

  function later(wait) {
    const at = Math.max(performance.now() + wait, notBefore);
    if (at >= dueAt) return;
    clearTimeout(timer);
    dueAt = at;
    timer = setTimeout(() => { dueAt = Infinity; renew(); }, at - performance.now());
  }

  function stop() {
    clearTimeout(timer);
    dueAt = Infinity;
    if (source !== null) source.close();
    source = null;
  }

  function start() {
    if (way === undefined || !on() || document.hidden) return;
    listen();
    later(notBefore === 0 ? STREAMED : 0); // a page that was hidden is old
  }

  function listen() {
    if (way !== "stream" || source !== null) return;
    source = new EventSource(main.dataset.events);
    source.addEventListener("message", () => later(0));
    source.addEventListener("error", () => {
      if (source !== null && source.readyState === EventSource.CLOSED) source = null; // refused; polling is left
    });
  }

  async function renew() {
    if (asking || document.hidden || !on()) return;
    if (busy()) return later(LEAST);
    asking = true;
    const began = performance.now();
    try {
      await ask();
      failed = 0;
    } catch {
      failed += 1;
    }
    asking = false;
    const ended = performance.now();
    notBefore = ended + Math.max(LEAST, SLOWER * (ended - began));
    say();
    if (failed > 0) listen();
    later(Math.min(LONGEST, (source !== null && failed === 0 ? STREAMED : POLLED) * 2 ** Math.min(failed, 8)));
  }

  async function ask() {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(ANSWER) });
    if (answer.redirected || answer.status === 401 || answer.status === 403) return location.reload(); // signed out
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (busy() || document.hidden || !on()) return later(LEAST); // what was begun meanwhile comes first
    const fresh = page.getElementById("main");
    showTimes(fresh);
    const active = document.activeElement;
    patch(main, fresh);
    if (document.activeElement !== active) (active.isConnected ? active : main).focus({ preventScroll: true });
    document.title = page.title;
  }

  // Make `old` like `fresh`. An element that stays keeps its focus, its scroll, its input, and whether it is open.
  function patch(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    const known = new Map();
    for (const each of old.children) if (key(each) !== null && !known.has(key(each))) known.set(key(each), each);
    let at = old.firstChild;
    for (const wanted of fresh.childNodes) {
      const name = key(wanted);
      const found = name === null ? at : known.get(name) ?? null;
      known.delete(name);
      if (found === null || found.nodeName !== wanted.nodeName || key(found) !== name) {
        old.insertBefore(document.importNode(wanted, true), at);
        continue;
      }
      if (found === at) at = at.nextSibling;
      else old.insertBefore(found, at);
      patch(found, wanted);
    }
    while (at !== null) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  // By what an element is known again; null if it is by its place alone.
  function key(node) {
    if (node.nodeName === "TR") return rowKey(node);
    if (node.nodeName === "FORM") return formKey(node);
    if (node.nodeName === "TD") return node.dataset.label ?? (node.querySelector("form") === null ? null : "forms"); // a column may come before it
    return node.nodeType === Node.ELEMENT_NODE && node.id ? `#${node.id}` : null;
  }

  // A row is the same if it is of the same thing: its heading, else its first link. So focus follows a job that moves.
  function rowKey(row) {
    const named = row.querySelector("th[scope=row]") ?? row.querySelector("a[href]");
    return named === null ? null : named.textContent;
  }

  // A form is the same if it does the same to the same thing, and says so. Else a button that has the focus would become
  // the button of another action, and the next key would do that one.
  function formKey(form) {
    const fixed = [...form.querySelectorAll("input[type=hidden]")].map((each) => [each.name, each.value]);
    const labels = [...form.querySelectorAll("button")].map((each) => each.textContent);
    return JSON.stringify([form.method, form.getAttribute("action"), fixed, labels]);
  }

  function say() {
    liveSwitch.setAttribute("aria-pressed", String(on()));
    liveSwitch.classList.toggle("silent", on() && failed > 0);
    liveSwitch.title = !on() ? "Live updates: off" : failed > 0 ? "Live updates: no answer" : "Live updates: on";
    liveSwitch.firstElementChild.textContent = liveSwitch.title;
  }

  if (way !== undefined) {
    liveSwitch.hidden = false;
    say();
    liveSwitch.addEventListener("click", () => {
      keep("live", on() ? "off" : "on");
      failed = 0;
      say();
      if (on()) start(); else stop();
    });
    document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else start(); });
    addEventListener("pagehide", stop);
    addEventListener("pageshow", (event) => { if (event.persisted) start(); });
    start();
  }
})();
