// A live session of JavaScript:
//     node --expose-internals --no-force-async-hooks-checks session.js LINK ANSWERS [MAX_FRAME_BYTES]
//
// Theory of operation: the main thread is the guest's. It evaluates each run by V8's inspector in REPL mode, as a
// browser's console does: names outlive their run and may be declared again, `await` stands anywhere, and the value is
// that of the last expression. A worker thread is the driver. It alone reads LINK and writes to ANSWERS, so no frame is
// torn when the guest is stopped half-way; it hears SIGINT while the guest computes, and has V8 terminate whatever the
// guest is doing, be it a run or a callback. `process.exit` is stopped the same way. A guest that waits is not stopped:
// its run is declared to be over. The options are for that: one lets a thread that is not the main one hear signals, and
// without the other Node.js would end over the bookkeeping of async_hooks, which a termination skips.

'use strict';

const { Session } = require('node:inspector');
const { inspect, types } = require('node:util');
const { isMainThread, parentPort, Worker, workerData } = require('node:worker_threads');

const { parse, stringify } = JSON; // a run may replace them
const MAX_FRAME_BYTES = Number((isMainThread && process.argv[4]) || 9 * 1024 * 1024);
const MAX_TEXT = Math.floor(MAX_FRAME_BYTES / 32); // characters of a bundle that is a value, or of a printed traceback
const MAX_VALUE = 60000; // characters of a value or its repr, as in Python
const [MAX_WORDS, MAX_TRACEBACK] = [2000, 8000]; // of an error's name or message, and of what is told of its traceback
const PATIENCE_MS = 100; // how long an idle guest may take to say so before it counts as busy
const MAX_DISPLAYS = 16; // not yet read by the caller, before `display` waits
const MAX_SHOWN = 30 * 1024 * 1024; // bytes of all displays of a run, each of which counts as a 500th at least
const MAX_PARTS = 30000; // of a value; the caller reads no frame with many more, nor more displays
const MAX_SHOWN_PARTS = 24000; // lists, objects and members of all displays of a run, which the caller counts too
const [MAX_METADATA, MAX_METADATA_PARTS] = [64 * 1024, 1000];
const FEW_PARTS = 32; // that the caller may count in any frame, since it does not look whether they stand in texts
const [SIGINT, EXIT_BROKEN] = [2, 70];
const NOTHING = 0; // the number of a run that is none: interrupts before it were for the one before
const [DISPLAYS, FINISHED] = [0, 1]; // places in the shared memory: displays under way, runs that are over
const INTERRUPTED = { exit_code: 1, error: { name: 'Interrupted', message: 'the run was interrupted', traceback: '' } };

// ---------------------------------------------------------------------------------------------- the driver's thread

function beDriver() {
  const guest = new Session();
  guest.connectToMainThread();
  const { Socket } = require('node:net');
  const link = new Socket({ fd: workerData.fds[0], readable: true, writable: false });
  const pipe = new Socket({ fd: workerData.fds[1], readable: false, writable: true }).on('error', () => {});
  const waiting = [];
  let run = null; // the id of the current one
  let [lastId, pings] = [0, 0];
  let ended = null; // what it came to, while the guest has its last turn
  let isAbandoned = false; // whether a run was declared over that the guest may go on with
  let isEarly = false; // whether the next run was interrupted before it began
  let isLeaving = false;
  let wakeUp = null; // a timer, while a termination is under way
  let probe = null; // what to do when the guest answers, while it is asked whether it rests

  const send = (message, then) => {
    const body = Buffer.from(stringify(message));
    const header = Buffer.alloc(4);
    header.writeUInt32BE(body.length);
    pipe.write(Buffer.concat([header, body]), then);
  };
  const tell = (message) => parentPort.postMessage(message);
  const finish = (result) => {
    if (run !== null) send({ op: 'done', id: run, ...result });
    run = ended = null;
    Atomics.add(workerData.shared, FINISHED, 1);
    begin();
  };
  const begin = () => {
    if (run !== null || wakeUp !== null || probe !== null || waiting.length === 0) return;
    if (isAbandoned) return ask((isBusy) => (isAbandoned = false) || (isBusy && stop({})));
    const { id, code, ...options } = waiting.shift();
    const isInterrupted = isEarly;
    isEarly = false;
    run = lastId = id;
    if (id === NOTHING) return finish({});
    if (isInterrupted) return finish(INTERRUPTED);
    tell({ op: 'run', id, code, options, finished: Atomics.load(workerData.shared, FINISHED) });
  };
  // Call back with whether the guest is too busy to answer.
  const ask = (then) => {
    const answer = (isBusy) => {
      clearTimeout(timer);
      probe = null;
      then(isBusy);
      begin();
    };
    const timer = setTimeout(answer, PATIENCE_MS, true);
    probe = { number: ++pings, answer };
    tell({ op: 'ping', number: pings });
  };
  // A guest that came to rest meanwhile is woken by a message, whose receipt is then what the termination strikes.
  const stop = (result) => {
    if (wakeUp !== null) return;
    Atomics.add(workerData.shared, FINISHED, 1); // before the guest can begin a run that still waits for its turn
    wakeUp = setInterval(tell, PATIENCE_MS, { op: 'ping' });
    guest.post('Runtime.terminateExecution', () => {
      clearInterval(wakeUp);
      wakeUp = null;
      finish(result);
    });
  };
  const settle = (isBusy) => {
    if (run === null || wakeUp !== null) return;
    if (ended === null && isBusy) return stop(INTERRUPTED);
    isAbandoned ||= ended === null;
    finish(ended ?? INTERRUPTED);
  };
  // A run is on the link before it is interrupted, and what is there is read before signals are heard.
  listenForInterrupts(() => {
    if (run === null) isEarly = waiting.length > 0 || reader.isWithin();
    else if (wakeUp === null && probe === null) ask(settle);
  });
  const leave = () => {
    tell({ op: 'leave' });
    setTimeout(leave, PATIENCE_MS); // once more, if a termination strikes the receipt of this one
    if (isLeaving) stop({});
    isLeaving = true;
  };
  const countDisplay = () => Atomics.sub(workerData.shared, DISPLAYS, 1) && Atomics.notify(workerData.shared, DISPLAYS);
  const answers = {
    ready: () => send({ op: 'ready', runtime: `Node.js ${process.version}` }),
    pong: ({ number }) => probe !== null && number === probe.number && probe.answer(false),
    display: ({ data, metadata }) => send({ op: 'display', id: run ?? lastId, data, metadata }, countDisplay),
    cut: () => send({ op: 'cut' }, countDisplay),
    exit: ({ code }) => stop({ exit_code: code }),
    done: ({ id, result }) => {
      if (id !== run || wakeUp !== null) return;
      ended = result;
      if (probe === null) ask(settle); // meanwhile the guest prints what the run rejected and nobody handled
    },
  };
  parentPort.on('message', (message) => answers[message.op](message));
  const reader = frameReader((message) => message.op === 'run' && waiting.push(message) && begin());
  link.on('data', reader.read);
  link.once('end', leave).on('error', () => {});
}

// Public interfaces bring signals to the main thread, which may be busy; the handle beneath them works in any thread.
function listenForInterrupts(interrupt) {
  process.emitWarning = () => {}; // it would say that this is internal
  const { Signal } = require('internal/test/binding').internalBinding('signal_wrap');
  const signal = new Signal();
  signal.onsignal = interrupt;
  signal.start(SIGINT);
}

function frameReader(receive) {
  let [pieces, missing] = [[], 4];
  const read = (data) => {
    pieces.push(data);
    missing -= data.length;
    while (missing <= 0) {
      const buffer = Buffer.concat(pieces);
      const end = buffer.length < 4 ? 4 : 4 + buffer.readUInt32BE();
      missing = end - buffer.length;
      pieces = [buffer.subarray(missing > 0 ? 0 : end)];
      if (missing > 0) return;
      receive(parse(buffer.toString('utf8', 4, end)));
      missing = 4 - pieces[0].length;
    }
  };
  return { read, isWithin: () => pieces.some((piece) => piece.length > 0) };
}

// ------------------------------------------------------------------------------------------------ the guest's thread

function beGuest() {
  process.on('SIGINT', () => {}); // for as long as the driver does not listen
  const shared = new Int32Array(new SharedArrayBuffer(8));
  const driver = new Worker(__filename, { workerData: { fds: process.argv.slice(2, 4).map(Number), shared } });
  driver.on('error', (error) => report(error) && process.reallyExit(EXIT_BROKEN));
  process.argv = [process.execPath];
  prepareStreams();
  prepareErrors();
  prepareExit(driver);
  prepareModules();
  let left = MAX_SHOWN;
  const display = (value, metadata = {}) => {
    if (left < 0) return;
    const { size, parts, ...bundle } = rendered(value, metadata);
    left -= Math.max(size, MAX_SHOWN / 500, (parts * MAX_SHOWN) / MAX_SHOWN_PARTS);
    const message = left < 0 ? { op: 'cut' } : { op: 'display', ...bundle };
    while (Atomics.load(shared, DISPLAYS) >= MAX_DISPLAYS) Atomics.wait(shared, DISPLAYS, MAX_DISPLAYS, PATIENCE_MS);
    driver.postMessage(message);
    Atomics.add(shared, DISPLAYS, 1);
  };
  define('display', () => display);
  const evaluate = prepareEvaluation();
  const orders = {
    ping: ({ number }) => driver.postMessage({ op: 'pong', number }),
    leave: () => {
      require('node:fs').closeSync(2); // Node.js would complain that the driver still debugs it
      process.reallyExit(0);
    },
    run: ({ id, code, options, finished }) => {
      if (Atomics.load(shared, FINISHED) !== finished) return; // it was interrupted while it waited for a callback
      left = MAX_SHOWN;
      isNotebook = options.is_notebook === true;
      const done = (result) => driver.postMessage({ op: 'done', id, result });
      try {
        surround(options);
      } catch (error) {
        return done(failed(error));
      }
      evaluate(id, code, done);
    },
  };
  driver.on('message', (message) => orders[message.op](message));
  driver.once('online', () => driver.postMessage({ op: 'ready' }));
}

let isNotebook = false; // whether an error of this run is told in its answer alone
let before = {}; // variables of the last run alone, as they were

// Restore the variables of the last run; set those of this one alone, and go to the folder that it begins in.
function surround({ env = {}, cwd }) {
  const assign = ([name, value]) => (value === undefined ? delete process.env[name] : (process.env[name] = value));
  Object.entries(before).forEach(assign);
  before = Object.fromEntries(Object.keys(env).map((name) => [name, process.env[name]]));
  Object.entries(env).forEach(assign);
  if (cwd !== undefined) process.chdir(cwd);
}

// Define a global that is made when it is asked for, and that a run may declare or replace.
function define(name, get) {
  const is = { configurable: true, writable: true, enumerable: true };
  const set = (value) => Object.defineProperty(globalThis, name, { ...is, value });
  Object.defineProperty(globalThis, name, { configurable: true, get, set });
}

// Standard output and error are written at once, and keep no state that a termination could leave half-changed.
function prepareStreams() {
  const { writeSync } = require('node:fs');
  const pause = new Int32Array(new SharedArrayBuffer(4));
  const writeAll = (fd, bytes) => {
    for (let rest = bytes; rest.length > 0; ) {
      try {
        rest = rest.subarray(writeSync(fd, rest));
      } catch (error) {
        if (error.code !== 'EAGAIN') return; // nobody reads any more
        Atomics.wait(pause, 0, 0, 2); // a child process has made the pipe non-blocking
      }
    }
  };
  class Pipe extends require('node:stream').Writable {
    write(chunk, ...more) {
      const encoding = typeof more[0] === 'string' ? more[0] : 'utf8';
      writeAll(this.fd, typeof chunk === 'string' ? Buffer.from(chunk, encoding) : chunk);
      const callback = more.find((one) => typeof one === 'function');
      if (callback) process.nextTick(callback);
      return true;
    }
    end(...words) {
      if (words.length > 0 && typeof words[0] !== 'function') this.write(...words);
      return this;
    }
    destroy() {
      return this;
    }
  }
  for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
    const stream = Object.assign(new Pipe(), { fd, _type: 'pipe' });
    Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => stream });
  }
}

// What nobody catches is printed and ends nothing. A rejection that nobody handles comes here too.
function prepareErrors() {
  process.setUncaughtExceptionCaptureCallback((error) => {
    if (process.listenerCount('uncaughtException') === 0) return report(error);
    try {
      process.emit('uncaughtException', error, 'uncaughtException');
    } catch (another) {
      report(another);
    }
  });
}

function prepareExit(driver) {
  const never = new Int32Array(new SharedArrayBuffer(4));
  process.exit = function exit(code = process.exitCode) {
    driver.postMessage({ op: 'exit', code: Number(code ?? 0) & 255 });
    for (;;) Atomics.wait(never, 0, 0); // for the termination
  };
}

// `require` and `import` are those of a module in the working directory, wherever that is by now.
function prepareModules() {
  const Module = require('node:module');
  const cells = new Map();
  const cellIn = (folder) => {
    const module = new Module(`${folder}/cell.cjs`);
    process.mainModule = module; // scripts ask by `require.main === module` whether they are the program
    module.filename = module.id;
    module.paths = Module._nodeModulePaths(folder);
    module._compile('module.own = { require, load: (name, options) => import(name, options) }', module.filename);
    const { own } = module;
    delete module.own;
    return { ...own, module };
  };
  const cell = () => {
    const folder = process.cwd();
    if (!cells.has(folder)) cells.set(folder, cellIn(folder));
    return cells.get(folder);
  };
  define('require', () => cell().require);
  define('module', () => cell().module);
  define('exports', () => cell().module.exports);
  define('__filename', () => cell().module.filename);
  define('__dirname', () => process.cwd());
  define(IMPORT, () => cell().load);
  const names = Module.builtinModules.filter((name) => /^[a-z]\w*$/.test(name) && !(name in globalThis));
  for (const name of names) define(name, () => require(name));
}

// Return a function that evaluates code and calls back with what a `done` frame says of it.
function prepareEvaluation() {
  const session = new Session();
  session.connect();
  const post = session.post.bind(session);
  const { nextTick } = process;
  const promises = new Map(); // by the id of the run
  let received, receiver;
  globalThis[IMPORT + 's'] = (value) => (received = value);
  post('Runtime.evaluate', { expression: IMPORT + 's' }, (_, { result }) => (receiver = result.objectId));
  delete globalThis[IMPORT + 's'];
  // The inspector describes values; this brings the value itself.
  const fetchValue = ({ type, value, objectId, unserializableValue }) => {
    const argument = objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value };
    const functionDeclaration = 'function (value) { this(value) }';
    const named = type === 'undefined' ? {} : argument;
    post('Runtime.callFunctionOn', { objectId: receiver, functionDeclaration, arguments: [named] });
    return received;
  };
  const resultOf = async (id, code, { result, exceptionDetails: details }) => {
    const value = fetchValue(details?.exception ?? result);
    post('Runtime.releaseObjectGroup', { objectGroup: 'run' });
    if (details) return failed(value, placeOf(value, id, code, details));
    try {
      return succeeded(types.isPromise(value) ? await value : value);
    } catch (error) {
      return failed(error);
    }
  };
  // Tell whether V8 could not read the code at all: then nothing of it has run.
  const isUnreadable = (answer, id) => {
    const details = answer?.exceptionDetails;
    if (details?.exception?.className !== 'SyntaxError' || details.stackTrace) return false;
    return !String(details.exception.description).includes(`cell-${id}:`);
  };
  const evaluate = (id, given, done, written) => {
    const code = given.replace(TYPESCRIPT, '');
    const source = written ?? (code === given ? code : javascriptOf(code));
    process.exitCode = undefined;
    const expression = `${asExpression(rewriteImports(source))}\n//# sourceURL=cell-${id}`;
    const settings = { expression, replMode: true, objectGroup: 'run' };
    const conclude = (failure, answer) => {
      promises.delete(id);
      const other = source === code && isUnreadable(answer, id) ? javascriptOf(code) : code;
      if (other !== code) return evaluate(id, code, done, other);
      if (failure) return done({ exit_code: 1, error: { name: 'Error', message: failure.message, traceback: '' } });
      resultOf(id, code, answer).then(done, (error) => done(failed(error)));
    };
    // From the event loop, so that no frame of this file is below the run's. Unlike that of immediates, the queue of
    // ticks survives a termination.
    nextTick(onNextPromise, (promise) => promises.set(id, promise));
    nextTick(post, 'Runtime.evaluate', settings, conclude);
  };
  return evaluate;
}

// A cell may be TypeScript: one that begins by saying so, or that is no JavaScript.
const TYPESCRIPT = /^\/\* typescript \*\//;

function javascriptOf(code) {
  try {
    return typeof withoutTypes === 'function' ? withoutTypes(code) : code;
  } catch {
    return code; // V8 says what is wrong
  }
}

// Call back with the next promise that is made. The first of a run is its own, and somebody has to hold it: when it was
// collected, the inspector would say so in the middle of a collection, where no JavaScript may run.
function onNextPromise(callback) {
  const stop = require('node:v8').promiseHooks.onInit((promise) => {
    stop();
    callback(promise);
  });
}

// ------------------------------------------------------------------------------------------------------------ values

function succeeded(value) {
  if (value === undefined) return { exit_code: 0 };
  const result = { exit_code: 0 };
  const text = isExact(value, { parts: 0 }) ? stringify(value) : undefined;
  if (text !== undefined && text.length <= MAX_VALUE) result.value = value;
  else result.value_repr = cut(safely(() => inspect(value)), MAX_VALUE);
  const data = mimeBundle(value) ?? (isNotebook ? shownBundle(value) : undefined);
  if (data !== undefined && stringify(data).length <= MAX_TEXT) result.data = data;
  return result;
}

function failed(error, place = '') {
  const traceback = cut(report(error, place, isNotebook), MAX_TRACEBACK);
  const isError = types.isNativeError(error);
  // The error of a child process that an interrupt ended comes before the interrupt itself.
  const isInterrupt = safely(() => isError && error.signal === 'SIGINT') === true;
  if (isInterrupt) return { ...INTERRUPTED, error: { ...INTERRUPTED.error, traceback } };
  const name = cut(safely(() => (isError ? String(error.name) : 'Error')), MAX_WORDS);
  const message = cut(safely(() => (isError ? String(error.message) : inspect(error))), MAX_WORDS);
  return { exit_code: 1, error: { name, message, traceback } };
}

// Print an error without the frames of this file, and return what was printed.
function report(error, place = '', isTold = false) {
  const lines = safely(() => inspect(error)).split('\n');
  const isOurs = (line) => /^ +at /.test(line) && (line.includes(__filename) || line.includes('(node:inspector:'));
  const kept = lines.filter((line, at) => {
    return !isOurs(line) && !(line.includes('processTicksAndRejections (node:') && at > 0 && isOurs(lines[at - 1]));
  });
  const text = cut(`${place}Uncaught ${kept.join('\n')}`, MAX_TEXT);
  if (!isTold) process.stderr.write(`${text}\n`);
  return text;
}

// A syntax error of the run itself has no frame that says where it is.
function placeOf(error, id, code, { lineNumber, columnNumber }) {
  if (!(error instanceof SyntaxError) || String(error.stack).includes(`cell-${id}:`)) return '';
  const lines = code.split('\n');
  const line = Math.min(lineNumber, lines.length - 1); // an end that comes too soon is behind the last one
  const column = line === lineNumber ? columnNumber : lines[line].length;
  return `cell-${id}:${line + 1}:${column + 1}\n${lines[line]}\n${' '.repeat(column)}^\n`;
}

function safely(text) {
  try {
    return text();
  } catch {
    return '(it cannot be shown)';
  }
}

const cut = (text, most) => whole(text.length <= most ? text : `${text.slice(0, most)}…`);

// Replace halves of characters, of which the caller takes only so many.
const whole = (text) => text.replace(/\p{Surrogate}/gu, '\ufffd');

function rendered(value, metadata) {
  const text = stringify({ data: mimeBundle(value) ?? (isNotebook ? shownBundle(value) : { 'text/plain': whole(inspect(value)) }), metadata });
  const bytes = Buffer.byteLength(text); // the caller takes less of what is not ASCII, or has many escapes
  const size = Math.max(bytes === text.length ? bytes : 2 * bytes, 9 * text.split('\\').length);
  if (size > MAX_FRAME_BYTES - 200) throw new RangeError('display: too much for one frame');
  const bundle = parse(text);
  const isLarge = bundle.metadata !== undefined && stringify(bundle.metadata).length > MAX_METADATA;
  if (isLarge || partsOf(bundle.metadata) > MAX_METADATA_PARTS) bundle.metadata = {};
  const parts = Math.max(8 + partsOf(bundle.data) + partsOf(bundle.metadata), FEW_PARTS);
  return { ...bundle, size, parts };
}

// Return of how many lists, objects and members JSON is: the caller reads only so many, and nothing nested deeply.
function partsOf(value, depth = 0) {
  if (typeof value !== 'object' || value === null) return 0;
  if (depth > 100) return Infinity;
  const inner = Object.values(value);
  return inner.reduce((sum, one) => sum + partsOf(one, depth + 1), 1 + inner.length);
}

// Return a value in each format that it offers, as kernels of JavaScript ask for them, and as text.
function shownBundle(value) {
  const asked = safely(() => bundleOf(value));
  const data = typeof asked === 'object' ? mimeBundle(asked) : undefined;
  return { 'text/plain': whole(cut(safely(() => inspect(value)), MAX_VALUE)), ...data };
}

const METHODS = { _toHtml: 'text/html', _toSvg: 'image/svg+xml', _toPng: 'image/png', _toJpeg: 'image/jpeg' };

function bundleOf(value) {
  if ((typeof value !== 'object' && typeof value !== 'function') || value === null) return undefined;
  const display = value[Symbol.for('Jupyter.display')] ?? value._toMime;
  if (typeof display === 'function') return display.call(value);
  const offered = Object.entries(METHODS).filter(([name]) => typeof value[name] === 'function');
  return Object.fromEntries(offered.map(([name, mime]) => [mime, value[name]()]));
}

// Return content by MIME type as text, with bytes in base64; undefined when `value` is anything else.
function mimeBundle(value) {
  if (!isPlain(value) || Array.isArray(value)) return undefined;
  const entries = Object.entries(value);
  if (entries.length === 0 || !entries.every(([mime]) => /^[a-z]+\/[\w.+-]+$/i.test(mime))) return undefined;
  const asText = (one) => {
    if (types.isUint8Array(one)) return Buffer.from(one).toString('base64');
    return typeof one === 'object' ? stringify(one) : String(one);
  };
  return Object.fromEntries(entries.map(([mime, one]) => [mime, whole(asText(one))]));
}

function isPlain(value) {
  if (typeof value !== 'object' || value === null || types.isProxy(value)) return false;
  const prototype = Object.getPrototypeOf(value);
  return prototype === null || prototype === (Array.isArray(value) ? Array.prototype : Object.prototype);
}

// Tell whether JSON says all of `value`, and nothing of it has to be called for that.
function isExact(value, count, depth = 0) {
  if ((count.parts += 1) > MAX_PARTS) return false;
  if (typeof value === 'string') return !/\p{Surrogate}/u.test(value);
  if (typeof value === 'number') return Number.isFinite(value) && !Object.is(value, -0);
  if (value === null || typeof value === 'boolean') return true;
  if (!isPlain(value) || depth > 100 || 'toJSON' in value) return false;
  const isList = Array.isArray(value);
  const keys = Reflect.ownKeys(value);
  if (isList && keys.length !== value.length + 1) return false; // holes, or properties beside the elements
  return keys.every((key) => {
    if (isList && key === 'length') return true;
    const { enumerable, value: one } = Object.getOwnPropertyDescriptor(value, key);
    return typeof key === 'string' && enumerable && isExact(key, count) && isExact(one, count, depth + 1);
  });
}

// -------------------------------------------------------------------------------------------------------------- code

// `{a: 1}` is an object where a statement could not be meant.
function asExpression(code) {
  if (!/^\s*\{/.test(code) || /;\s*$/.test(code)) return code;
  try {
    new (require('node:vm').Script)(`(${code}\n)`);
    return `(${code}\n)`;
  } catch {
    return code;
  }
}

// The inspector's code has no `import`. A function stands in for it, whose name is as long, so that columns stay.
const IMPORT = 'împort';
const TOKEN = /\/\/.*|\/\*[^]*?\*\/|'(?:\\[^]|[^'\\\n])*'|"(?:\\[^]|[^"\\\n])*"|[\w$\u0080-\uffff]+|\s+|[^]/y;
const PATTERN = /\/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n[])+\/\w*/y;
const TEMPLATE = /(?:\\[^]|\$(?!\{)|[^\\`$])*(?:`|\$\{)?/y;
const BEFORE_PATTERN = /^(?:|[({[,;=:?!&|+\-*%^~<>}]|return|typeof|case|in|of|do|else|void|delete|throw|new|await)$/;
const CALL = /import(?=\s*\()/y;
const STATEMENT =
  /import\b\s*(?:([\w$]+)\s*,?\s*)??(?:\*\s*as\s+([\w$]+)\s*|(\{[^{}'"`]*\})\s*)?(?:\bfrom\s*)?('[^'\n]+'|"[^"\n]+")(?:\s*(with|assert)\s*(\{[^}]*\}))?/y;

function rewriteImports(code) {
  if (!/\bimport\b/.test(code)) return code;
  let [at, written, before, isInTemplate] = [0, '', '', false];
  const braces = []; // for each open one, whether it belongs to a template
  const take = (expression) => {
    expression.lastIndex = at;
    const found = expression.exec(code);
    at += found?.[0].length ?? 0;
    return found;
  };
  while (at < code.length) {
    if (isInTemplate) {
      const text = take(TEMPLATE)[0] || code[at++];
      isInTemplate = !/[`{]$/.test(text) || text === '{';
      if (text.endsWith('${')) braces.push(true);
      before = text.endsWith('`') ? '`' : '(';
      written += text;
      continue;
    }
    const isAtStart = braces.length === 0 && /(?:^|[\n;])[ \t]*$/.test(written.slice(-200));
    const found = before === '.' ? null : take(CALL) ? IMPORT : isAtStart && take(STATEMENT);
    const token = found || (BEFORE_PATTERN.test(before) && take(PATTERN)?.[0]) || take(TOKEN)[0];
    if (typeof token !== 'string') {
      written += `${asCall(token)};`;
      before = ')';
      continue;
    }
    if (token === '{') braces.push(false);
    isInTemplate = token === '`' || (token === '}' && braces.pop() === true);
    if (!/^(?:\s|\/[/*])/.test(token)) before = token;
    written += token;
  }
  return written;
}

// Say an import statement by a call: `import a, { b as c } from "d"` gives two names of what the call returns.
function asCall([, main, all, some, from, word, attributes]) {
  const call = `await ${IMPORT}(${from}${word ? `, { ${word}: ${attributes} }` : ''})`;
  const names = some?.slice(1, -1).replace(/\bas\b/g, ':');
  if (all) return `const ${all} = ${call}${main ? `, ${main} = ${all}.default` : ''}`;
  if (!main && names === undefined) return call;
  return `const { ${main ? `default: ${main}, ` : ''}${names ?? ''} } = ${call}`;
}

if (isMainThread) beGuest();
else beDriver();
