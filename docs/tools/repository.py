#!/usr/bin/env python3
"""Preprocessor of mdBook: links to files of the repository outside of docs.

Such a link becomes one to the source browser `KVTIER_SOURCE_URL` (such as https://HOST/kvtier/blob/v0.1.0), or without
it to a copy below `source/`. `KVTIER_SOURCE_LIST` names a file that receives the paths to copy; repository.py copy does it:

    repository.py copy LIST OUT     writes OUT/source/PATH.html for each path of the list
"""

import html
import json
import os
import posixpath
import re
import subprocess
import sys

from markdown import links_replaced

DOCS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def outside(page, target):
    """The path in the repository that a link of a page names, and its fragment; None for other links."""
    if "://" in target or target.startswith(("#", "mailto:", "/")):
        return None
    path, _, fragment = target.partition("#")
    # Pages stand in docs/.
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if path == "docs" or path.startswith(("docs/", "../")) or path == "..":
        return None
    return path, fragment


def copy_of(root, path):
    """The path of the copy of a file or folder."""
    if os.path.isdir(os.path.join(root, path)):
        return f"source/{path}/index.html"
    # mdBook rewrites links with `.md`.
    return f"source/{re.sub('[.]md$', '_md', path)}.html"


def replaced(page, text, root, url, needed):
    """A page with its links outside of docs replaced; adds their paths to `needed`."""
    def replace(target):
        found = outside(page, target)
        if found is None:
            return target
        path, fragment = found
        if url:
            return f"{url.rstrip('/')}/{path}" + (f"#{fragment}" if fragment else "")
        needed.add(path)
        return posixpath.relpath(copy_of(root, path), posixpath.dirname(page) or ".")

    return links_replaced(text, replace)


def preprocess():
    """Reads a book from the standard input and writes it with its links replaced."""
    context, book = json.load(sys.stdin)
    root = os.path.dirname(context["root"].rstrip("/"))
    needed = set()

    def walk(items):
        for item in items:
            chapter = item.get("Chapter") if isinstance(item, dict) else None
            if chapter is None:
                continue
            if chapter.get("path"):
                url = os.environ.get("KVTIER_SOURCE_URL", "")
                chapter["content"] = replaced(chapter["path"], chapter["content"], root, url, needed)
            walk(chapter["sub_items"])

    walk(book["items"])
    if "KVTIER_SOURCE_LIST" in os.environ:
        with open(os.environ["KVTIER_SOURCE_LIST"], "w", encoding="utf-8") as out:
            out.writelines(f"{path}\n" for path in sorted(needed))
    json.dump(book, sys.stdout)


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{path}</title><style>:root {{ color-scheme: light dark }} body {{ margin: 1em; font-family: system-ui, sans-serif }}
pre {{ font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; tab-size: 4 }}</style></head>
<body><h1>{path}</h1>
{body}
</body></html>
"""


def tracked(root, path):
    """The names directly in a folder that git knows, or without git all of them."""
    try:
        listed = subprocess.run(["git", "-C", os.path.join(root, path), "ls-files", "-z"], check=True,
                                capture_output=True, text=True).stdout.split("\0")
        names = {name.split("/")[0] for name in listed if name}
    except (OSError, subprocess.CalledProcessError):
        names = set()
    return sorted(names) or sorted(os.listdir(os.path.join(root, path)))


def write(out, name, path, body):
    """Writes the copy of a file or folder."""
    target = os.path.join(out, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "w", encoding="utf-8") as page:
        page.write(PAGE.format(path=html.escape(path), body=body))


def copy_file(root, out, path):
    """Copies a file as a page."""
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as source:
        text = source.read()
    write(out, copy_of(root, path), path, f"<pre>{html.escape(text)}</pre>")


def copy(listing, out):
    """Copies the files of a list, and of a folder the files directly in it."""
    root = os.path.dirname(DOCS)
    with open(listing, encoding="utf-8") as lines:
        paths = lines.read().split("\n")
    for path in filter(None, paths):
        if not os.path.exists(os.path.join(root, path)):
            sys.exit(f"a page links to {path}, which does not exist")
        if not os.path.isdir(os.path.join(root, path)):
            copy_file(root, out, path)
            continue
        rows = []
        for name in tracked(root, path):
            if os.path.isdir(os.path.join(root, path, name)):
                rows.append(f"<li>{html.escape(name)}/</li>")
            else:
                copy_file(root, out, f"{path}/{name}")
                link = posixpath.basename(copy_of(root, f"{path}/{name}"))
                rows.append(f'<li><a href="{html.escape(link)}">{html.escape(name)}</a></li>')
        write(out, copy_of(root, path), path, f"<ul>{''.join(rows)}</ul>")


def main():
    """Runs as the command line asks."""
    if sys.argv[1:2] == ["supports"]:
        sys.exit(0)
    if sys.argv[1:2] == ["copy"] and len(sys.argv) == 4:
        copy(sys.argv[2], sys.argv[3])
    elif len(sys.argv) == 1:
        preprocess()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
