// A terminal in a sandbox: xterm.js on the web socket of its route, within the page's policy for styles.
"use strict";

(() => {
  const place = document.querySelector("[data-terminal]");
  const state = document.getElementById("state");
  const again = document.getElementById("again");

  // xterm.js makes style elements, and writes style attributes as text. The policy allows neither, but what a script
  // sets by itself: sheets that the document adopts, and properties of an element's style.
  const sheeted = (element) => {
    const sheet = new CSSStyleSheet();
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
    Object.defineProperty(element, "textContent", { set: (text) => sheet.replaceSync(text) });
    return element;
  };
  const create = document.createElement.bind(document);
  document.createElement = (kind, options) => kind === "style" ? sheeted(create("template")) : create(kind, options);
  HTMLElement.prototype.setAttribute = function setAttribute(name, value) {
    if (name === "style") this.style.cssText = value;
    else Element.prototype.setAttribute.call(this, name, value);
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const theme = () => ({
    background: colour("--sunk"), foreground: colour("--text"), cursor: colour("--accent"), cursorAccent: colour("--sunk"),
    selectionBackground: colour("--accent-soft"), selectionForeground: colour("--text"),
  });

  const terminal = new Terminal({
    screenReaderMode: true, scrollback: 5000, minimumContrastRatio: 4.5, theme: theme(),
    fontFamily: colour("--mono"), fontSize: Math.round(parseFloat(getComputedStyle(place).fontSize)),
    linkHandler: { activate: () => {} }, // an address that a guest wrote leads nowhere
  });
  const fit = new FitAddon.FitAddon();
  terminal.loadAddon(fit);
  terminal.open(place);
  fit.fit();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { terminal.options.theme = theme(); });

  let socket = null;
  const MOST_WAITING = 4 << 20; // bytes that are not drawn yet: nobody can ask a web socket to wait
  let waiting = 0;
  let isLeftOut = false;
  const encoder = new TextEncoder();

  const say = (text, isOver) => {
    state.textContent = text;
    again.hidden = !isOver;
  };

  const show = (bytes) => {
    if (waiting + bytes.length > MOST_WAITING) {
      isLeftOut = true;
      return;
    }
    waiting += bytes.length;
    terminal.write(bytes, () => {
      waiting -= bytes.length;
      if (!isLeftOut || waiting > 0) return;
      isLeftOut = false;
      terminal.write("\x1b[0m\r\n[output that came faster than it can be shown was left out]\r\n");
    });
  };

  // A browser does not say why a web socket was refused.
  const why = async () => {
    try {
      const answer = await fetch(place.dataset.sandbox);
      const said = await answer.json();
      return `No terminal was opened: ${said.detail ?? `the sandbox is ${said.state}`}.`;
    } catch {
      return "No terminal was opened: the service does not answer.";
    }
  };

  const open = () => {
    const address = new URL(place.dataset.terminal, location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    address.search = new URLSearchParams({ rows: terminal.rows, columns: terminal.cols });
    say("It is being opened.", false);
    socket = new WebSocket(address);
    socket.binaryType = "arraybuffer";
    let ended = "";
    let isOpen = false;
    socket.addEventListener("open", () => {
      isOpen = true;
      say("The shell runs.", false);
      terminal.focus();
    });
    socket.addEventListener("message", (event) => {
      if (typeof event.data !== "string") return show(new Uint8Array(event.data));
      const said = JSON.parse(event.data);
      ended = `The shell has ended: ${said.status}, exit ${said.exitCode}.`;
    });
    socket.addEventListener("close", async (event) => {
      if (!isOpen) ended = await why();
      say(ended || `The connection is closed${event.reason ? `: ${event.reason}` : ""}.`, true);
      if (place.contains(document.activeElement)) again.focus();
    });
  };

  const sendMessage = (data) => { if (socket?.readyState === WebSocket.OPEN) socket.send(data); };
  const send = (text) => sendMessage(encoder.encode(text));
  terminal.onData(send);
  terminal.onBinary((text) => sendMessage(Uint8Array.from(text, (one) => one.charCodeAt(0))));
  terminal.onResize(({ rows, cols }) => sendMessage(JSON.stringify({ resize: [rows, cols] })));

  // Escape and then Tab goes on to the next control, so that nobody is caught. Escape alone is the program's: it is sent
  // with the next key, or a moment later.
  const HELD_MS = 500;
  let isLeaving = false;
  let held = 0;
  const dropEscape = () => {
    clearTimeout(held);
    held = 0;
  };
  const sendEscape = () => {
    if (held) send("\x1b");
    dropEscape();
  };
  terminal.attachCustomKeyEventHandler((event) => {
    if (event.type !== "keydown" || ["Shift", "Control", "Alt", "Meta"].includes(event.key)) return true;
    if (event.key === "Tab" && isLeaving) {
      isLeaving = false;
      dropEscape();
      return false;
    }
    sendEscape();
    isLeaving = event.key === "Escape" && !(event.ctrlKey || event.altKey || event.metaKey || event.isComposing);
    if (isLeaving) held = setTimeout(sendEscape, HELD_MS);
    return !isLeaving;
  });
  new ResizeObserver(() => fit.fit()).observe(place);
  again.addEventListener("click", () => {
    terminal.reset();
    open();
  });
  open();
})();
