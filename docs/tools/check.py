"""Check the built site: links, what its pages load, and that every public name is on its page.

    python docs/tools/check.py build/site               what needs no network; `make docs` runs it
    python docs/tools/check.py build/site --external    the links to other hosts, too; `make docs-links`

MkDocs checks the links in Markdown. These checks read the HTML, so they also cover links that plugins, themes and
docstrings make.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

import pages


class Page(HTMLParser):
    """A page of HTML.

    Attributes:
        ids: the anchors in it.
        links: where its links lead.
        loads: addresses that a browser fetches with it.
        text: its text.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.loads.add(values["href"])
        elif "src" in values:
            self.loads.add(values["src"])

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
        self.text += data


def is_foreign(address: str) -> bool:
    """Whether an address leads to another host, or to no page at all."""
    return bool(urlparse(address).scheme or address.startswith("//"))


def faults(site: Path) -> list[str]:
    """What is wrong with a site, without a look at other hosts."""
    root = site.resolve()

    @cache
    def page(path: Path) -> Page:
        return Page(path.read_text())

    found = []
    for path in sorted(root.rglob("*.html")):
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        here = path.relative_to(root)
        found += [f"{here} loads {address} from another host" for address in page(path).loads if is_foreign(address)]
        for address in page(path).links | page(path).loads:
            if is_foreign(address):
                continue
            target, _, anchor = unquote(urljoin(path.as_uri(), address)).removeprefix("file://").partition("#")
            other = Path(target.partition("?")[0])
            other = other / "index.html" if other.is_dir() else other
            if not other.exists() or (anchor and other.suffix == ".html" and anchor not in page(other).ids):
                found.append(f"{here}: no {address}")
    for module in pages.public_modules():
        shown = page(root / "reference" / "api" / f"{module}.html")
        named = {f"{pages.path_of(module)}.{name}": name for name in pages.public_names(module)}
        words = set(shown.text.replace("(", " ").split())
        found += [f"{name} is on no page" for name, short in named.items() if not {name, short} & (shown.ids | words)]
    return found


def external_faults(site: Path) -> list[str]:
    """The links to other hosts that do not answer."""
    addresses = {link for path in site.rglob("*.html") for link in Page(path.read_text()).links if is_foreign(link)}
    found = []
    for address in sorted(addresses):
        request = urllib.request.Request(address, headers={"User-Agent": "distopt-docs"})
        try:
            urllib.request.urlopen(request, timeout=20).close()
        except (urllib.error.URLError, TimeoutError) as error:
            found.append(f"{address}: {error}")
    print(f"{len(addresses)} links to other hosts")
    return found


def main() -> int:
    """Print what is wrong; the exit code is 1 if anything is."""
    site = Path(sys.argv[1])
    found = external_faults(site) if "--external" in sys.argv else faults(site)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
