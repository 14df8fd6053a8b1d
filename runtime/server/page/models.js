/** The names of the models, for the top of the page. */

/**
 * @param {{id: string, draft: string | null}} known
 * @returns {(Node | string)[]}
 */
export function namesOf({ id, draft }) {
  return [part(name(id)), " ", draft ? part("drafted by ", name(draft)) : part("without a drafter")];
}

/** The publisher is left out where there is little room. */
function name(path) {
  const [model, publisher] = path.split("/").filter(Boolean).reverse();
  const words = document.createElement("b");
  const before = document.createElement("span");
  before.className = "publisher";
  before.textContent = publisher === undefined ? "" : `${publisher}/`;
  words.append(before, model ?? path);
  words.title = path;
  return words;
}

/** What is in a line of its own where there is little room. */
function part(...words) {
  const span = document.createElement("span");
  span.className = "part";
  span.append(...words);
  return span;
}
