"""MkDocs' hooks: they add the pages that come from sources, and mark examples."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import pages

MARKS = {"DO NOT": "do-not", "INSTEAD": "instead"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called once, before the navigation is made."""
    for path, text in pages.generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Called with each page's HTML."""
    for title, mark in MARKS.items():
        html = html.replace(f'<span class="filename">{title}', f'<span class="filename {mark}">{title}')
    return html
