/** Buttons that copy. */

const SAID_MS = 1500;

/**
 * A button that copies a text; hidden if the page may not copy.
 *
 * @param {() => string} textOf
 * @param {string} label for readers who do not see where the button is.
 */
export function copyButton(textOf, label) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", label);
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(textOf());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), SAID_MS);
  });
  return button;
}
