/** Whether the model of an answer is being loaded, which the server says of it while the answer has not begun. */

import { Failure, models } from "./generation.js";

const LOOK_MS = 1000;

/**
 * @param {import("./generation.js").Generation} generation that has just asked.
 * @param {{id: string, state?: string}} model its model, as it was before.
 * @param {string | null} key
 */
export async function watchLoading(generation, model, key) {
  // A model that was loaded may have been unloaded meanwhile; most often it answers before anybody looks.
  if (model.state === "loaded") await pause();
  while (generation.isUnanswered && model.state !== undefined) {
    try {
      const now = (await models(key)).find(({ id }) => id === model.id);
      // Somebody asks for it, so one that is not loaded soon will be.
      if (now?.state !== undefined) generation.loads(now.state !== "loaded");
    } catch (problem) {
      if (!(problem instanceof Failure)) throw problem; // the answer itself tells of what is wrong
    }
    await pause();
  }
}

const pause = () => new Promise((resolve) => setTimeout(resolve, LOOK_MS));
