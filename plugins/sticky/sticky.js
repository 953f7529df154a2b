// world: selector
//
// A selector: a lane stays with its worker. Each pop says who asks (`hint.worker=NAME`); of
// all workers that asked of late, the one with the highest hash of (worker, partition) owns
// a partition (rendezvous hashing), and only its pops are offered it. A worker that comes or
// goes moves only its own share of the partitions.
//
// Settings:
// - `lifetime-ms` (15000): a worker that has not asked for so long has gone.
// - `strict` (false): `true` withholds other workers' partitions; otherwise they come last,
//   so that a worker with nothing of its own helps the others.

import * as state from "waspmq:plugin/state@1.0.0";

let lifetime = 15000;
let strict = false;

// No TextDecoder here: names are written as UTF-16 code units.
const encode = (text) => {
  const bytes = new Uint8Array(text.length * 2);
  for (let i = 0; i < text.length; i++) {
    bytes[2 * i] = text.charCodeAt(i) & 255;
    bytes[2 * i + 1] = text.charCodeAt(i) >> 8;
  }
  return bytes;
};
const decode = (bytes) => {
  let text = "";
  for (let i = 0; i + 1 < bytes.length; i += 2) text += String.fromCharCode(bytes[i] | (bytes[i + 1] << 8));
  return text;
};

// FNV-1a with a final mix (the finalizer of MurmurHash3), so that near names are far apart.
const hash = (text) => {
  let h = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 0x01000193);
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
};

// The workers that live, by name, with the time of their last pop.
const living = (worker, now) => {
  const stored = state.get("workers");
  const workers = stored ? JSON.parse(decode(stored)) : {};
  for (const name of Object.keys(workers)) if (now - workers[name] > lifetime) delete workers[name];
  workers[worker] = now;
  state.set("workers", encode(JSON.stringify(workers)));
  return Object.keys(workers);
};

const owner = (workers, partition) => {
  let best = workers[0];
  let highest = -1;
  for (const name of workers) {
    const weight = hash(name + "\u0000" + partition);
    if (weight > highest || (weight === highest && name > best)) [best, highest] = [name, weight];
  }
  return best;
};

export const candidateSelector = {
  init(settings) {
    for (const [key, value] of settings) {
      if (key === "lifetime-ms" && /^[1-9][0-9]{0,9}$/.test(value)) lifetime = Number(value);
      else if (key === "strict" && (value === "true" || value === "false")) strict = value === "true";
      else throw new Error(`sticky has the settings lifetime-ms (a number) and strict (true, false), got ${key}=${value}`);
    }
  },

  select(request, candidates) {
    const hint = request.hints.find(([name]) => name === "worker");
    const all = candidates.map((_, index) => index);
    // Who does not say who it is gets whatever is there.
    if (!hint) return Uint32Array.from(all);
    const workers = living(hint[1], Number(request.nowMs));
    const mine = all.filter((index) => owner(workers, candidates[index].partition) === hint[1]);
    if (strict) return Uint32Array.from(mine);
    const own = new Set(mine);
    return Uint32Array.from([...mine, ...all.filter((index) => !own.has(index))]);
  },
};
