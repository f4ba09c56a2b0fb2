"""Check in a browser that no page of the built site is cut, on a wide screen and on a phone.

    python docs/tools/fit.py build/site [chromium]      what `make docs-fit` runs, in a minute

One headless Chromium loads all pages, one after the other, into a frame of each width, from a server of this process,
and sends back what does not fit: a page wider than the frame; a table, a block of code, a picture or a line of text
that goes beyond its frame or a box, unless the box scrolls; and README, the first page, if it is longer than
`README_HEIGHT`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

WIDTHS = (1360, 390)
README_HEIGHT = 3000  # pixels, at the first width
LIMIT_SECONDS = 300
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
# Visits every page; the parent page and the frames have one origin.
SCRIPT = """
const faults = [];
function name(element) {
  const text = (element.textContent || element.src || "").trim().replace(/\\s+/g, " ").slice(0, 60);
  return element.tagName.toLowerCase() + ` "${text}"`;
}
function look(page, width, view) {
  const body = view.document.scrollingElement;
  const end = view.document.querySelector("article").getBoundingClientRect().bottom;
  if (page === "index.html" && width === WIDTHS[0] && end > README_HEIGHT)
    faults.push(`${page} at ${width}: ends at ${Math.round(end)} px`);
  if (body.scrollWidth > width) faults.push(`${page} at ${width}: the page is ${body.scrollWidth} wide`);
  for (const element of view.document.querySelectorAll("article :is(table, pre, img, h1, h2, h3, p, li, code)")) {
    const box = element.getBoundingClientRect();
    let right = width, scrolls = false;
    for (let outer = element.parentElement; outer && outer !== body; outer = outer.parentElement) {
      const overflow = view.getComputedStyle(outer).overflowX;
      if (overflow === "visible") continue;
      scrolls = overflow === "auto" || overflow === "scroll";
      right = outer.getBoundingClientRect().right;
      break;
    }
    if (box.width && box.right > right + 1 && !scrolls)
      faults.push(`${page} at ${width}: ${name(element)} is cut by ${Math.round(box.right - right)} px`);
  }
}
async function visit(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  await new Promise((loaded) => { frame.onload = loaded; frame.src = page; document.body.append(frame); });
  look(page, width, frame.contentWindow);
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await visit(page, width);
  await fetch("/faults", { method: "POST", body: JSON.stringify(faults) });
})();
"""


class Server(ThreadingHTTPServer):
    """Serves the site, and the page that visits it; `faults` is what that has sent."""

    def __init__(self, site: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(site)))
        self.pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
        self.faults: list[str] | None = None

    def visitor(self) -> bytes:
        """The page that visits all others."""
        head = (
            f"const PAGES = {json.dumps(self.pages)}, WIDTHS = {json.dumps(WIDTHS)}, README_HEIGHT = {README_HEIGHT};"
        )
        return f"<!doctype html><body><script>{head}{SCRIPT}</script>".encode()


class Handler(SimpleHTTPRequestHandler):
    """See `Server`."""

    server: Server

    def do_GET(self) -> None:
        """A file of the site, or the page that visits all."""
        if self.path != "/":
            super().do_GET()
            return
        text = self.server.visitor()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        """The result."""
        faults = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.faults = faults
        Thread(target=self.server.shutdown).start()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> int:
    """Print what does not fit; the exit code is 1 if anything does not, or the browser has not ended in time."""
    site, chromium = Path(sys.argv[1]).resolve(), (*sys.argv[2:], "chromium")[0]
    if shutil.which(chromium) is None:
        print(f"there is no {chromium}; on Debian: apt install chromium")
        return 1
    server = Server(site)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/"
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--window-size=1400,1000", address]
        browser = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        serving.join(LIMIT_SECONDS)
        browser.kill()
        browser.wait()
    if server.faults is None:
        print(f"{chromium} has not visited all pages within {LIMIT_SECONDS} s")
        return 1
    print(*server.faults, f"{len(server.pages)} pages at {WIDTHS} pixels: {len(server.faults)} faults", sep="\n")
    return 1 if server.faults else 0


if __name__ == "__main__":
    sys.exit(main())
