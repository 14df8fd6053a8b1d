"""A real browser that opens a page, runs a script in it, and returns the script's result.

The script is inserted into a copy of the page, and its result into its document.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
IN_APPLICATIONS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
VARIABLE = "OUTRIDER_CHROMIUM"

# Errors anywhere in the page are collected and returned. Frames are drawn when the script says so.
BEFORE = """<script>
window.wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push("wants " + event.blockedURI));
window.frames_due = [];
window.requestAnimationFrame = (callback) => frames_due.push(callback);
</script>"""

AFTER = """<script>
(() => {
  const $ = (id) => document.getElementById(id), lanes = $("lanes");
  const frame = () => { while (frames_due.length) frames_due.shift()(0); };
  const send = (target, event) => { target.dispatchEvent(event); frame(); };
  const always = { bubbles: true, cancelable: true };
  const key = (target, name) => send(target, new KeyboardEvent("keydown", { key: name, ...always }));
  const at = (x, y) => {
    const box = lanes.getBoundingClientRect();
    return { clientX: box.left + x, clientY: box.top + y, pointerId: 1, ...always };
  };
  const pointer = (kind, x, y, more = {}) => send(lanes, new PointerEvent(kind, { ...at(x, y), ...more }));
  const wheel = (x, more) => send(lanes, new WheelEvent("wheel", { ...at(x, 70), ...more }));
  const hover = (element) => send(element, new MouseEvent("mouseover", always));
  const view = () => { const d = lanes.dataset; return { from: +d.from, to: +d.to, round: d.round, drawn: +d.drawn }; };
  // Where in the canvas a moment is.
  const place = (us) => { const v = view(); return 64 + ((us - v.from) / (v.to - v.from)) * (lanes.clientWidth - 64); };
  const data = JSON.parse($("data").textContent);
  // Synthetic pointers cannot be captured.
  lanes.setPointerCapture = () => {};
  const outcome = document.createElement("pre");
  outcome.id = "outcome";
  try {
    frame();
    const returned = (() => { SCRIPT })();
    outcome.textContent = JSON.stringify({ returned, wrong });
  } catch (error) {
    outcome.textContent = JSON.stringify({ wrong: [...wrong, String(error.stack)] });
  }
  document.body.append(outcome);
})();
</script>"""


def find() -> str | None:
    """Path of Chromium or a browser based on it: the one that the environment names, else one that is installed."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or (IN_APPLICATIONS if Path(IN_APPLICATIONS).exists() else None)


def visit(chromium: Any, page: str, script: str, scratch: Path, *, width: int = 1280) -> Any:
    """Open a page in a browser of `visitors.chromium`, and return what a script returns, a function's body that may
    use `AFTER`.
    """
    file = scratch / "page.html"
    file.write_text(
        page.replace("<head>", "<head>" + BEFORE, 1).replace("</body>", AFTER.replace("SCRIPT", script) + "</body>", 1)
    )
    with chromium.new_page(viewport={"width": width, "height": 900}) as tab:
        tab.goto(file.as_uri())
        said = json.loads(tab.locator("#outcome").text_content())
    assert said["wrong"] == []
    return said["returned"]
