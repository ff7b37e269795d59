// The caller's functions for a Node program: the module `cloche_host`, loaded before the program, which is also a global.
//
// Frames are those of `init.wire`: length, number, kind (nine bytes), then JSON. Calls go to descriptor 5, answers come on
// 6. A call returns a promise. One read waits at a time, and none while no call is open, so the program ends as usual.
"use strict";
const fs = require("fs");
const Module = require("module");
const [CALLS, ANSWERS, HEADER, HELLO, OPEN, CLOSE] = [5, 6, 9, 0, 1, 7];
const GONE = "the caller takes no more calls from this program";
const waiting = new Map();
let [received, number, isReading, isLost, writing] = [Buffer.alloc(0), 0, false, false, Promise.resolve()];

class HostError extends Error {
  constructor(message, kind) {
    super(message);
    this.name = "HostError";
    this.kind = kind;
  }
}

function frame(kind, index, body) {
  const header = Buffer.alloc(HEADER);
  header.writeUInt32BE(body.length, 0);
  header.writeUInt32BE(index, 4);
  header[8] = kind;
  return Buffer.concat([header, body]);
}

function takeFrame() {
  if (received.length < HEADER) return null;
  const end = HEADER + received.readUInt32BE(0);
  if (received.length < end) return null;
  const taken = { number: received.readUInt32BE(4), kind: received[8], body: received.subarray(HEADER, end) };
  received = received.subarray(end);
  return taken;
}

function readGreeting() {
  const piece = Buffer.alloc(65536);
  for (;;) {
    const taken = takeFrame();
    if (taken !== null) return JSON.parse(taken.body);
    const count = fs.readSync(ANSWERS, piece, 0, piece.length, null);
    if (count === 0) return { functions: [] };
    received = Buffer.concat([received, piece.subarray(0, count)]);
  }
}

function read() {
  if (isReading || isLost || waiting.size === 0) return;
  isReading = true;
  const piece = Buffer.alloc(65536);
  fs.read(ANSWERS, piece, 0, piece.length, null, (error, count) => {
    isReading = false;
    if (error || count === 0) return lose();
    received = Buffer.concat([received, piece.subarray(0, count)]);
    for (let taken = takeFrame(); taken !== null; taken = takeFrame()) settle(taken);
    read();
  });
}

function settle({ number: index, kind, body }) {
  const call = waiting.get(index);
  if (kind !== CLOSE || call === undefined) return;
  waiting.delete(index);
  const answer = JSON.parse(body);
  if (answer.error === undefined) call.resolve(answer.value);
  else call.reject(new HostError(answer.error.message, answer.error.kind));
}

function lose() {
  isLost = true;
  for (const call of waiting.values()) call.reject(new HostError(GONE, "gone"));
  waiting.clear();
}

function write(data) {
  return new Promise((resolve) => {
    fs.write(CALLS, data, 0, data.length, null, (error, count) => {
      if (error) lose();
      resolve(error || count === data.length ? undefined : write(data.subarray(count)));
    });
  });
}

function isPlain(value) {
  return typeof value === "object" && value !== null && Object.getPrototypeOf(value) === Object.prototype;
}

// Arguments are given by position, by name in one object, or both.
function named(parameters, values) {
  const last = values[values.length - 1];
  const rest = parameters.slice(values.length - 1);
  const isNamed = isPlain(last) && Object.keys(last).length > 0 && Object.keys(last).every((name) => rest.includes(name));
  const data = isNamed ? { ...last } : {};
  const more = [];
  (isNamed ? values.slice(0, -1) : values).forEach((value, index) => {
    if (value === undefined) return;
    if (index < parameters.length) data[parameters[index]] = value;
    else more.push(value);
  });
  return { data, more };
}

function functionOf(row) {
  const call = (...values) =>
    new Promise((resolve, reject) => {
      if (isLost) return reject(new HostError(GONE, "gone"));
      const body = Buffer.from(JSON.stringify({ call: row.name, ...named(row.parameters, values) }));
      number += 1;
      waiting.set(number, { resolve, reject });
      const data = frame(OPEN, number, body);
      writing = writing.then(() => write(data));
      read();
    });
  Object.defineProperty(call, "name", { value: row.name });
  return Object.assign(call, { doc: row.doc });
}

const host = { HostError };
let isGreeted = false;
const greeted = new Proxy(host, {
  get(target, name) {
    if (!isGreeted && name !== "HostError") {
      isGreeted = true;
      for (const row of readGreeting().functions) host[row.name] = functionOf(row);
    }
    return target[name];
  },
});
Object.defineProperty(globalThis, "cloche_host", { value: greeted });
const load = Module._load;
Module._load = function (request, ...rest) {
  return request === "cloche_host" ? greeted : load.call(this, request, ...rest);
};
