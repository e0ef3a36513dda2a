#!/usr/bin/env python3
"""Input filter of Doxygen: prints a header with comments that Doxygen reads as they are meant.

- names of functions become links;
- numbers of a list begin in one column, and a wide gap after a name becomes a colon;
- indented code is marked as such.
"""

import glob
import os
import re
import sys

COMMENT = re.compile(r"^(\s*///)(.*)$")
FUNCTION = re.compile(r"(?<![\w`#])(kvt_[a-z0-9_]+)(?![\w`(*])")


def functions(folder):
    """The functions that the headers of a folder declare."""
    names = set()
    for path in glob.glob(os.path.join(folder, "*.h")):
        with open(path, encoding="utf-8") as header:
            names.update(re.findall(r"^[a-z][^/;\n]*?\b(kvt_[a-z0-9_]+)\(", header.read(), re.M))
    return names


def filtered(text, known):
    """The text of a header, as Doxygen gets it."""
    out, is_code, is_after_blank = [], False, False
    lines = text.split("\n")
    for at, line in enumerate(lines):
        found = COMMENT.match(line)
        if not found:
            out.append(line)
            is_code = is_after_blank = False
            continue
        mark, body = found[1], found[2]
        if body.startswith("     ") and (is_code or is_after_blank):
            begin = "" if is_code else "@code{.c}"
            is_code = True
            following = COMMENT.match(lines[at + 1]) if at + 1 < len(lines) else None
            is_last = not following or not following[2].startswith("     ")
            end = "@endcode" if is_last else ""
            out += [f"{mark} {part}" for part in (begin, body[5:], end) if part]
            is_code = not is_last
            is_after_blank = False
            continue
        is_after_blank = not body.strip()
        body = re.sub(r"^ +(\d+[.]) (\w+) {2,}", r" \1 \2: ", body)
        body = re.sub(r"^ +(\d+[.]) ", r" \1 ", body)
        body = FUNCTION.sub(lambda m: m[1] + "()" if m[1] in known else m[0], body)
        out.append(mark + body)
    return "\n".join(out)


def main():
    """Filters the file that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as source:
        text = source.read()
    sys.stdout.write(filtered(text, functions(os.path.dirname(sys.argv[1]))) if sys.argv[1].endswith(".h") else text)


if __name__ == "__main__":
    main()
