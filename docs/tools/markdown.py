"""A reader of Markdown that knows as much as the checks of the manual need."""

import re

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([^`]*)$")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
# [text](target "title"), also with an image as its text.
LINK = re.compile(r"(!?)\[((?:[^\[\]\\]|\\.|\[(?:[^\[\]\\]|\\.)*\](?:\([^()\s]*\))?)*)\]"
                  r"\(\s*(<[^<>]*>|(?:[^\s()\\]|\\.|\([^\s()]*\))*)(?:\s+\"[^\"]*\"|\s+'[^']*')?\s*\)")
DEFINITION = re.compile(r"^\s{0,3}\[([^\]]+)\]:\s*(\S+)")
HTML_LINK = re.compile(r"<(a|img|source)\b[^>]*?\b(href|src|srcset)\s*=\s*[\"']([^\"']+)[\"']", re.I)
HTML_ID = re.compile(r"<[a-z][^>]*?\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']", re.I)


class Block:
    """A fenced block: its language, its text, and the number of its first line."""

    def __init__(self, language, text, line):
        self.language, self.text, self.line = language, text, line


class Page:
    """The parts of a page that are checked. Lines are counted from 1."""

    def __init__(self, text):
        self.blocks, self.headings, self.links, self.images, self.ids = [], [], [], [], []
        # Prose without code, and spans of code, by line.
        self.prose, self.spans = [], []
        self.unclosed = 0
        self._read(text)

    def _read(self, text):
        text = re.sub(r"<!--.*?-->", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
        fence, language, lines, start, indent = None, "", [], 0, 0
        for number, line in enumerate(text.split("\n"), 1):
            found = FENCE.match(line)
            if fence:
                is_end = found and found[2][0] == fence[0] and len(found[2]) >= len(fence) and not found[3].strip()
                if is_end:
                    self.blocks.append(Block(language, "\n".join(lines) + "\n", start))
                    fence = None
                else:
                    lines.append(line[min(indent, len(line) - len(line.lstrip())):])
                continue
            if found:
                fence, lines, start, indent = found[2], [], number + 1, len(found[1])
                language = re.split(r"[\s,{]", found[3].strip(), maxsplit=1)[0]
                continue
            self._line(number, line)
        if fence:
            self.unclosed = start - 1

    def _line(self, number, line):
        for _, code in CODE.findall(line):
            self.spans.append((number, code.strip()))
        heading = HEADING.match(line)
        if heading:
            self.headings.append((number, len(heading[1]), heading[2]))
        plain = CODE.sub(lambda m: "`" * len(m.group(0)), line)
        self.prose.append((number, plain))
        self._links(number, plain)
        definition = DEFINITION.match(plain)
        if definition:
            self.links.append((number, definition[2]))
        for _, attribute, target in HTML_LINK.findall(plain):
            if attribute.lower() == "href":
                self.links.append((number, target))
            else:
                self.images += [(number, part.split()[0], "html") for part in target.split(",")]
        self.ids += HTML_ID.findall(plain)

    def _links(self, number, text):
        for mark, label, target in LINK.findall(text):
            target = target.strip("<>")
            if mark:
                self.images.append((number, target, label))
            else:
                self.links.append((number, target))
                self._links(number, label)

    def anchors(self):
        """The ids of the page, as mdBook makes them of headings."""
        used = set()
        for _, _, text in self.headings:
            own = re.search(r"\{\s*#([^\s}]+)[^}]*\}\s*$", text)
            name = own[1] if own else anchor(text)
            unique, count = name, 0
            while unique in used:
                count += 1
                unique = f"{name}-{count}"
            used.add(unique)
        return used | set(self.ids)


def anchor(heading):
    """The id of a heading: its rendered text in small letters, with - for spaces."""
    text = LINK.sub(lambda m: m.group(2), heading)
    # Marks of emphasis go, those inside of words and of code stay.
    parts = re.split(r"(`+[^`]*`+)", text)
    for at in range(0, len(parts), 2):
        part = re.sub(r"\*+", "", parts[at])
        part = re.sub(r"(?<!\w)_+(?=\S)|(?<=\S)_+(?!\w)", "", part)
        parts[at] = re.sub(r"<[^>]*>", "", part)
    text = "".join(part.strip("`") if at % 2 else part for at, part in enumerate(parts))
    text = text.replace("\\", "").strip().lower()
    text = re.sub(r"\s", "-", text)
    return "".join(c for c in text if c.isalnum() or c in "_-")


def links_replaced(text, replace):
    """The text with replace(target) for every target of a link outside of code."""
    out, fence = [], None
    for line in text.split("\n"):
        found = FENCE.match(line)
        if fence:
            if found and found[2][0] == fence[0] and len(found[2]) >= len(fence) and not found[3].strip():
                fence = None
        elif found:
            fence = found[2]
        else:
            line = _line_replaced(line, replace)
        out.append(line)
    return "\n".join(out)


def _line_replaced(line, replace):
    parts, at = [], 0
    for code in CODE.finditer(line):
        parts += [(line[at:code.start()], False), (code.group(0), True)]
        at = code.end()
    parts.append((line[at:], False))
    # Spans of code may stand in the text of a link, so they are put back afterwards.
    kept = [part for part, is_code in parts if is_code]
    text = "".join("\x00" if is_code else part for part, is_code in parts)

    def target_of(match, group):
        old = match.group(group)
        start, end = match.start(group) - match.start(0), match.end(group) - match.start(0)
        return match.group(0)[:start] + replace(old) + match.group(0)[end:]

    text = re.sub(r"(?<=\]\()([^\s()<>]+)(?=[\s)])", lambda m: replace(m.group(1)), text)
    text = DEFINITION.sub(lambda m: target_of(m, 2), text)
    text = HTML_LINK.sub(lambda m: target_of(m, 3), text)
    for code in kept:
        text = text.replace("\x00", code, 1)
    return text
