// A process of a peer in node: `node ADAPTER.mjs setup | client | worker`. The same as __main__.py and handler.py say.
import fs from "node:fs";
import { createRequire } from "node:module";
import readline from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.env.BENCH_MODULES + "/");
export const load = (name) => import(require.resolve(name));
export const DSN = process.env.BENCH_DSN;
export const SETTINGS = JSON.parse(process.env.BENCH_SETTINGS ?? "{}");
export const HISTORY = process.env.BENCH_HISTORY === "1";
export const WORK_MS = 1000 * Number(process.env.BENCH_WORK ?? "0.001");
const TEXT = "x".repeat(160);
const PACE_SECONDS = 0.05;

const own = `${process.env.BENCH_WORKER ?? "0"}-${process.pid}`;
const folder = process.env.BENCH_FOLDER ?? ".";
const buffer = Buffer.alloc(8);
let file = null, starts = null, count = 0n;
// Node cannot map a file into memory: one small write a job, or one a millisecond if there are more.
let pending = false;
const write = () => { pending = false; buffer.writeBigInt64LE(count); fs.writeSync(file, buffer, 0, 8, 0); };
export function ran(number) {
  const began = now();
  if (file === null) {
    file = fs.openSync(`${folder}/count-${own}`, "w");
    if (process.env.BENCH_STARTS === "1") starts = fs.openSync(`${folder}/starts-${own}`, "a");
  }
  count++;
  if (!pending) { pending = true; setTimeout(write, 1); }
  if (starts !== null && number >= 0) fs.writeSync(starts, `${number} ${began}\n`);
}

const now = () => Number(process.hrtime.bigint()) / 1e9;
const job = (task, number) => (task === "application" ? { number, text: TEXT } : { number });
const pause = (seconds) => (seconds > 0 ? sleep(seconds * 1000) : undefined);
const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

const commands = {
  async one(peer, { task, n }) {
    const begun = now();
    for (let i = 0; i < n; i++) await peer.one(task, job(task, i));
    return { jobs: n, seconds: now() - begun };
  },
  async many(peer, { task, n, first = 0 }) {
    const jobs = Array.from({ length: n }, (_, i) => job(task, first + i)), begun = now();
    await peer.many(task, jobs);
    return { jobs: n, seconds: now() - begun };
  },
  async produce(peer, { task, seconds }) {
    const begun = now();
    let n = 0;
    while (now() - begun < seconds) await peer.one(task, job(task, n++));
    return { jobs: n, seconds: now() - begun };
  },
  async pace(peer, { task, rate, seconds }) {
    const events = [];
    for (let i = 0; i < Math.max(1, Math.round(rate * seconds)); i++) {
      await pause((0.5 + Math.random()) / rate);
      await peer.one(task, job(task, i));
      events.push([i, now()]);
    }
    return { events };
  },
  async flow(peer, { task, rate, seconds }) {
    const begun = now();
    let n = 0, passed;
    while ((passed = now() - begun) < seconds) {
      const due = Math.floor(rate * (passed + PACE_SECONDS)) - n;
      if (due > 0) { await peer.many(task, Array.from({ length: due }, () => job(task, -1))); n += due; }
      await pause(n / rate - (now() - begun));
    }
    return { jobs: n, seconds: now() - begun };
  },
};

export async function main(peer) {
  const [role] = process.argv.slice(2);
  if (role === "worker") return peer.work();
  if (role === "setup") { await peer.setup(); process.exit(0); }
  await peer.open();
  say({ ready: true });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { do: name, ...rest } = JSON.parse(line);
    say(await commands[name](peer, rest));
  }
  await peer.close();
  process.exit(0);
}
