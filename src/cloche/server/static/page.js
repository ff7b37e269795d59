// What htmx cannot: a run's output as it comes, keys, code that is kept, and what goes wrong on the way.
// All text of a run becomes text nodes, never markup.
"use strict";

(() => {
  const MOST_CHARS = 200000;
  const SEQUENCE = /(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]?|\x1b[ -/]{0,8}[0-~]?/g;
  const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f]/g;

  const announce = (text) => {
    const place = document.getElementById("announce");
    if (place) place.textContent = text;
  };

  // Live output

  class Output {
    constructor(place) {
      this.place = place;
      this.decoders = {};
      this.pending = [];
      this.count = 0;
      this.isPlanned = false;
    }

    add(piece) {
      const decoder = (this.decoders[piece.stream] ??= new TextDecoder());
      const bytes = piece.base64 === undefined ? null : Uint8Array.from(atob(piece.base64), (c) => c.charCodeAt(0));
      const text = bytes ? decoder.decode(bytes, { stream: true }) : piece.text;
      this.pending.push([piece.stream, text.slice(-MOST_CHARS)]);
      if (this.pending.length > 2000) this.pending.splice(0, 1000);
      if (!this.isPlanned) {
        this.isPlanned = true;
        requestAnimationFrame(() => this.show());
      }
    }

    show() {
      this.isPlanned = false;
      const isAtEnd = this.place.scrollTop + this.place.clientHeight >= this.place.scrollHeight - 8;
      for (const [stream, text] of this.pending.splice(0)) {
        const piece = document.createElement("span");
        if (stream === "stderr") piece.className = "err";
        piece.textContent = text.replace(SEQUENCE, "").replace(CONTROL, "");
        this.place.append(piece);
        this.count += piece.textContent.length;
      }
      while (this.count > MOST_CHARS && this.place.childNodes.length > 1) {
        this.count -= this.place.firstChild.textContent.length;
        this.place.firstChild.remove();
      }
      if (isAtEnd) this.place.scrollTop = this.place.scrollHeight;
    }
  }

  const follow = (run) => {
    if (run.dataset.followed) return;
    run.dataset.followed = "yes";
    const status = run.querySelector("[data-live-status]");
    const output = new Output(run.querySelector("[data-live-output]"));
    const source = new EventSource(run.dataset.events);
    const finish = () => {
      source.close();
      if (!run.isConnected) return;
      const swapped = htmx.ajax("GET", run.dataset.outcome, { target: run, swap: "outerHTML" });
      swapped.then(() => announce("The run has ended."));
    };
    source.addEventListener("started", () => { status.textContent = "running"; });
    source.addEventListener("output", (event) => {
      status.textContent = "running";
      output.add(JSON.parse(event.data));
    });
    source.addEventListener("missed", () => output.add({ stream: "stderr", text: "\n[earlier output is not shown]\n" }));
    source.addEventListener("result", finish);
    source.addEventListener("error", (event) => {
      // The service's own event has data; without, the connection broke, and the browser tries again by itself.
      if (event.data !== undefined || source.readyState === EventSource.CLOSED) finish();
    });
    run.scrollIntoView({ block: "nearest" });
    announce("The run has begun.");
  };

  const followAll = (below) => {
    for (const run of below.querySelectorAll("[data-events]")) follow(run);
    if (below.matches?.("[data-events]")) follow(below);
  };

  // Keys

  const isTyping = (element) => element.closest("input, textarea, select, [contenteditable]") !== null;

  const requests = () => [...document.querySelectorAll("[data-request]")];

  const chosen = () => document.activeElement?.closest?.("[data-request]") ?? null;

  const move = (step) => {
    const all = requests();
    const at = all.indexOf(chosen());
    const next = all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };

  // A call that takes two acts is not confirmed by the key that has approved it, pressed once more.
  const CONFIRM_AFTER_MS = 2000;
  const seen = new Map();
  const mayConfirm = (button) => {
    const number = button.form.action;
    if (!seen.has(number)) seen.set(number, performance.now());
    return document.activeElement === button && performance.now() - seen.get(number) >= CONFIRM_AFTER_MS;
  };
  const noteConfirmations = () => {
    for (const button of document.querySelectorAll('[data-press="approve"][value="confirm"]')) mayConfirm(button);
  };

  const press = (name) => {
    const button = chosen()?.querySelector(`[data-press="${name}"]`);
    if (!button) return;
    if (button.value === "confirm" && !mayConfirm(button)) {
      button.focus();
      announce("This call takes a second act: read it again, then press a on Confirm, two seconds later at the earliest.");
      return;
    }
    button.click();
  };

  const ACTIONS = { j: () => move(1), k: () => move(-1), a: () => press("approve"), d: () => press("deny") };
  let isGoing = false;

  const onKey = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.matches("[data-submit-key]")) {
      event.preventDefault();
      event.target.form.requestSubmit();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || isTyping(event.target)) return;
    if (isGoing) {
      isGoing = false;
      document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
    } else if (event.key === "g") {
      isGoing = true;
      setTimeout(() => { isGoing = false; }, 1500);
    } else if (requests().length && Object.hasOwn(ACTIONS, event.key)) {
      event.preventDefault();
      ACTIONS[event.key]();
    }
  };

  // A tab in code is a tab; Escape and then Tab goes on, so that nobody is caught.
  let isLeaving = false;
  const onTab = (event) => {
    if (!event.target.matches("textarea.code")) return;
    if (event.key === "Tab" && !event.shiftKey && !isLeaving) {
      event.preventDefault();
      event.target.setRangeText("    ", event.target.selectionStart, event.target.selectionEnd, "end");
    }
    isLeaving = event.key === "Escape";
  };

  // What a script puts in the place of the focused element gets the focus back.
  let focused = null;
  const selectorOf = (element) => {
    if (element?.id) return `#${CSS.escape(element.id)}`;
    for (const name of ["href", "action", "aria-label"]) {
      const value = element?.getAttribute?.(name);
      if (value) return `${element.localName}[${name}="${CSS.escape(value)}"]`;
    }
    return null;
  };
  document.addEventListener("htmx:beforeSwap", (event) => {
    const active = document.activeElement;
    focused = event.detail.target.contains(active) ? selectorOf(chosen() ?? active) : null;
  });
  document.addEventListener("htmx:afterSettle", () => {
    if (focused && document.activeElement === document.body) document.querySelector(focused)?.focus();
  });

  // How many approvals wait, in the title too, where it is seen from elsewhere.

  let waits = null;
  const showWaits = () => {
    const place = document.getElementById("waits");
    if (!place) return;
    const now = Number(place.dataset.waits);
    document.title = (now ? `(${now}) ` : "") + document.title.replace(/^\(\d+\) /, "");
    if (waits !== null && now > waits) announce(now === 1 ? "A request waits for a decision." : `${now} requests wait for a decision.`);
    waits = now;
  };

  // What goes wrong between here and the service: what it says where the answer would be, and that it does not answer.

  const trouble = (text) => {
    const place = document.getElementById("trouble");
    if (!place || place.textContent === text) return;
    place.hidden = !text;
    place.textContent = text;
  };
  // What nobody looks at is not asked for again, which would count as use of a sandbox; but how many approvals wait is.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const { elt } = event.detail;
    if (document.hidden && elt.id !== "waits" && elt.matches('[hx-trigger^="every"]')) event.preventDefault();
  });
  document.addEventListener("htmx:sendError", () => trouble("The service does not answer. What is shown may be old; it is asked again."));
  document.addEventListener("htmx:afterOnLoad", () => trouble(""));
  document.addEventListener("htmx:beforeSwap", (event) => {
    const answer = event.detail.xhr;
    if (!answer.getResponseHeader("Content-Type")?.startsWith("application/problem+json")) return;
    const problem = JSON.parse(answer.responseText);
    const note = document.createElement("p");
    note.className = "note bad";
    note.setAttribute("role", "alert");
    note.textContent = [problem.title, problem.detail, problem.remedy].filter(Boolean).join(". ");
    event.detail.serverResponse = note.outerHTML;
  });

  // What was typed into the form for a run is there again when one comes back, in this tab and until one logs out.

  const fields = (form) => [...form.elements].filter((one) => one.name && !["hidden", "file", "submit"].includes(one.type));

  const keepDraft = (form) => {
    try {
      const kept = Object.fromEntries(fields(form).map((one) => [one.name, one.value]));
      sessionStorage.setItem("draft", JSON.stringify({ ...kept, "": form.dataset.draft }));
    } catch { /* it is too large, or this browser keeps nothing */ }
  };

  const bringDraft = (form) => {
    form.addEventListener("input", () => keepDraft(form));
    form.addEventListener("change", () => keepDraft(form));
    const kept = JSON.parse(sessionStorage.getItem("draft") ?? "{}");
    if (form.dataset.draft && kept[""] !== form.dataset.draft) return keepDraft(form); // it was just asked for, as another run
    for (const one of fields(form)) {
      const isOffered = one.localName !== "select" || [...one.options].some((option) => option.value === kept[one.name]);
      if (typeof kept[one.name] === "string" && isOffered) one.value = kept[one.name];
    }
  };

  const begin = () => {
    followAll(document);
    noteConfirmations();
    showWaits();
    const form = document.querySelector("form[data-draft]");
    if (form) bringDraft(form);
    document.querySelector("form.leave")?.addEventListener("submit", () => sessionStorage.clear());
  };

  document.addEventListener("keydown", onKey);
  document.addEventListener("keydown", onTab);
  document.addEventListener("htmx:load", (event) => {
    followAll(event.detail.elt);
    noteConfirmations();
    if (event.detail.elt.id === "waits") showWaits();
  });
  document.addEventListener("DOMContentLoaded", begin);
})();
