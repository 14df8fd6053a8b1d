/** Whether the model of an answer is being loaded: asks the server, until the answer begins. */

import { Failure, models } from "./generation.js";

const LOOK_MS = 1000;

/**
 * @param {import("./generation.js").Generation} generation whose request is being sent.
 * @param {{id: string, state?: string}} model its model, as the server last described it.
 * @param {string | null} key
 */
export async function watchLoading(generation, model, key) {
  // A model that was loaded may have been unloaded meanwhile, but mostly it answers before the first look.
  if (model.state === "loaded") await pause();
  while (generation.isUnanswered && model.state !== undefined) {
    try {
      const now = (await models(key)).find(({ id }) => id === model.id);
      // It was asked for: if it is not loaded yet, it soon will be.
      if (now?.state !== undefined) generation.loads(now.state !== "loaded");
    } catch (problem) {
      if (!(problem instanceof Failure)) throw problem; // the request for the answer reports the problem
    }
    await pause();
  }
}

const pause = () => new Promise((resolve) => setTimeout(resolve, LOOK_MS));
