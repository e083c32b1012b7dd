// pg-boss.
import { setTimeout as sleep } from "node:timers/promises";
import { DSN, SETTINGS, WORK_MS, load, main, ran } from "./client.mjs";

const { PgBoss } = await load("pg-boss");
const begin = async (options) => {
  const boss = new PgBoss({ connectionString: DSN, useListenNotify: true, ...options });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  return boss;
};
const enqueuing = { supervise: false, schedule: false, useListenNotify: false };
const handlers = {
  noop: async (jobs) => { for (const { data } of jobs) ran(data.number); },
  application: async (jobs) => { await Promise.all(jobs.map(async ({ data }) => { ran(data.number); await sleep(WORK_MS); })); },
};
let boss;

await main({
  async setup() {
    boss = await begin(enqueuing);
    for (const name of [...Object.keys(handlers), "elsewhere"]) await boss.createQueue(name, { notify: true });
    await boss.stop();
  },
  async open() { boss = await begin(enqueuing); },
  async close() { await boss.stop(); },
  async one(task, job) { await boss.send(task, job); },
  async many(task, jobs) {
    for (let low = 0; low < jobs.length; low += SETTINGS.bulk)
      await boss.insert(task, jobs.slice(low, low + SETTINGS.bulk).map((data) => ({ data })));
  },
  async work() {
    boss = await begin({});
    const { batchSize, localConcurrency } = SETTINGS;
    for (const [name, handle] of Object.entries(handlers))
      await boss.work(name, { batchSize, localConcurrency, burstWhenBatchFull: true }, handle);
  },
});
