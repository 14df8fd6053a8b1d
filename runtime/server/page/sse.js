/**
 * Server-sent events, read from the body of a response to any method.
 *
 * After https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation; only the field
 * `data` is used here.
 */

/** The body ended with an error: its connection broke, or it was aborted. */
export class Broken extends Error {}

/** Lines of a text that comes in pieces, cut anywhere; a line ends with LF, CR or both. */
export class Lines {
  #begun = "";
  #endedWithCR = false;

  /** The lines that this piece completes. */
  add(piece) {
    if (piece === "") return []; // the bytes were only the beginning of a character
    if (this.#endedWithCR && piece.startsWith("\n")) piece = piece.slice(1);
    this.#endedWithCR = piece.endsWith("\r");
    const lines = piece.split(/\r\n|\n|\r/);
    lines[0] = this.#begun + lines[0];
    this.#begun = lines.pop();
    return lines;
  }
}

/**
 * The data of each event, once it is complete.
 *
 * @param {ReadableStream<Uint8Array>} body in pieces that may be cut anywhere, even within a character. It is
 *   cancelled when this generator is left.
 * @throws {Broken}
 */
export async function* eventData(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const lines = new Lines();
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((problem) => {
        throw new Broken(String(problem));
      });
      if (done) return; // an event without its empty line does not count
      for (const line of lines.add(decoder.decode(value, { stream: true }))) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line === "data" || line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // if the body has failed, this reports the same failure again
  }
}
