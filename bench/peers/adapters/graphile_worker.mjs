// graphile-worker.
import { setTimeout as sleep } from "node:timers/promises";
import { DSN, SETTINGS, WORK_MS, load, main, ran } from "./client.mjs";

const { Logger, WorkerPreset, makeWorkerUtils, run } = await load("graphile-worker");
const logger = new Logger(() => (level, text, meta) => { if (level === "error") console.error(text, meta?.error ?? ""); });
const delay = SETTINGS.completeJobBatchDelay;
const preset = {
  extends: [WorkerPreset],
  worker: {
    connectionString: DSN, logger, concurrentJobs: SETTINGS.concurrentJobs, maxPoolSize: SETTINGS.maxPoolSize,
    localQueue: { size: SETTINGS.localQueueSize }, completeJobBatchDelay: delay, failJobBatchDelay: delay,
  },
};
const taskList = {
  noop: async ({ number }) => { ran(number); },
  application: async ({ number }) => { ran(number); await sleep(WORK_MS); },
};
let utils;

await main({
  async setup() { utils = await makeWorkerUtils({ preset }); await utils.migrate(); await utils.release(); },
  async open() { utils = await makeWorkerUtils({ preset }); await utils.migrate(); },
  async close() { await utils.release(); },
  async one(task, job) { await utils.addJob(task, job); },
  async many(task, jobs) {
    for (let low = 0; low < jobs.length; low += SETTINGS.bulk)
      await utils.addJobs(jobs.slice(low, low + SETTINGS.bulk).map((payload) => ({ identifier: task, payload })));
  },
  async work() { const runner = await run({ preset, taskList }); await runner.promise; },
});
