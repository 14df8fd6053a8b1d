/** Buttons that copy. */

const SAID_MS = 1500;

/**
 * A button that copies a text; hidden where a page may not.
 *
 * @param {() => string} textOf
 * @param {string} label for who does not see where the button stands.
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
